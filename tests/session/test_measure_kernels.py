# SPDX-License-Identifier: Apache-2.0
"""Work of measuring around the kernels, with their emulation in their place: on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from sparge import Unsupported
from sparge.blocks import QUERY_BLOCK, pack, unpack, whole_steps
from sparge.head_settings import Router
from sparge.kernels import Element
from sparge.kernels.source import find_csrc
from sparge.order.grid import EMPTY, TokenGrid, TokenOrder, grid_order
from sparge.reference import log_scores
from sparge.reference.route import rank_blocks
from sparge.session import measure_kernels as module
from sparge.session.measure import MeasuredCall, measure
from sparge.stages.measuring import MOST_DENSITIES, Measuring
from sparge.stages.workspace import CallShape, WorkspaceLayout
from sparge.thresholds import COLUMNS
from tests.oracle import Quantized, attend, quantize_qkv
from tests.session.parts import measured_call
from tests.session.reference_score import score_by_reference

pytestmark = pytest.mark.usefixtures("one_thread")

GRID = TokenGrid(4, 8, 15, suffix=20)  # 32 slots of the last query block but the text are empty


class Stages:
    """What measurements launch."""

    def __init__(self) -> None:
        self.operands: list[Quantized] = []  # of the KV heads of the last workspace
        self.attended: list[Tensor] = []
        self.held: list[int] = []  # bytes of each workspace

    def measuring(self, k: Tensor, v: Tensor, order: TokenOrder, scale: float) -> Emulated:
        return Emulated(self, k, v, order, scale)


@dataclass
class Emulated:
    """`Measuring` in the kernels' arithmetic."""

    stages: Stages
    k: Tensor
    v: Tensor
    order: TokenOrder
    scale: float
    element = Element.INT8_FP16

    def means(self) -> Tensor:
        operands = quantize_qkv(self.k, self.k, self.v, element=self.element)
        found = torch.stack([operands.kbar, operands.vbar, operands.v_scale, operands.extent])
        return pad(found, (0, 64 - found.shape[-1]))

    def quantized(self, q: Tensor, means: Tensor) -> Tensor:
        assert self.order.order_kinds == 1 and means.shape == (4, *self.k.shape[:2], 64)
        shape = CallShape.of(q, self.k, self.order.slots)
        layout = WorkspaceLayout(shape, self.element, with_queries=False, with_pools=True)
        workspace = torch.full((layout.nbytes,), 255, dtype=torch.uint8)  # NaN
        self.stages.held.append(workspace.numel())
        self.stages.operands, group = [], q.shape[1] // self.k.shape[1]
        for head in range(self.k.shape[1]):
            own, of_own = slice(head, head + 1), slice(head * group, (head + 1) * group)
            given = q[:, of_own], self.k[:, own], self.v[:, own]
            x = quantize_qkv(*given, self.order, element=self.element)
            self.stages.operands.append(x)
            names = "k_block_mean", "k_variance", "v_block_mean", "v_variance"
            values = {name: getattr(x, name) for name in names}
            for name, value in (values | {"key_counts": x.key_counts.unsqueeze(1)}).items():
                # Of the caller's channels; the rest is padding.
                layout.view(workspace, name)[:, own].zero_()[tuple(map(slice, value.shape))] = value
        layout.means(workspace).copy_(means)
        return workspace

    def routed(
        self,
        workspace: Tensor,
        shape: CallShape,
        thresholds: Tensor,
        q_means: Tensor,
        q_similarity: Tensor,
    ) -> Tensor:
        layout = WorkspaceLayout(shape, self.element, with_queries=False, with_pools=True)
        assert layout.nbytes == workspace.numel()
        assert q_means.shape == (*shape[:2], shape.query_blocks, 64)
        assert q_means.is_contiguous() and q_similarity.numel() >= q_means[..., 0].numel()
        names = ("k_block_mean", "k_variance", "v_block_mean", "v_variance")
        facts_of_blocks: Any = SimpleNamespace(
            q_block_mean=q_means,
            key_counts=layout.view(workspace, "key_counts")[:, 0],
            **{name: layout.view(workspace, name).float() for name in names},
        )
        valid, forced = (facts_of_blocks.key_counts > 0)[:, None, None], self.order.keys_exact
        assert (thresholds[:, COLUMNS.index("router")] == Router.ERROR).all()
        scores = log_scores(facts_of_blocks, self.scale, valid)[1]
        rank = rank_blocks(scores.masked_fill(~valid | forced, -torch.inf))
        share = thresholds[:, COLUMNS.index("selection")]
        asked = (share * scores.shape[-1]).long().clamp(min=1)[:, None, None]
        wanted = whole_steps(asked, (valid & forced).sum(-1, keepdim=True))
        return pack(valid & (forced | (rank < wanted)))

    def attended(
        self, workspace: Tensor, q: Tensor, block_map: Tensor, slot_token: Tensor, keys: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert keys == self.order.slots
        (slots,) = slot_token
        rows_of_slots = (*q.shape[:2], block_map.shape[2] * QUERY_BLOCK, q.shape[-1])
        every_row = q.new_zeros(rows_of_slots)
        every_row[:, :, slots >= 0] = q[:, :, slots[slots >= 0]]
        sums = torch.empty(q.shape)
        row_max, row_sum = torch.empty(2, *q.shape[:3])
        operands = self.stages.operands
        for head, x in enumerate(operands):
            heads = slice(head, None, len(operands))  # batch entries are KV heads
            rows = every_row[heads]
            own = quantize_qkv(rows, rows, rows, element=self.element, extent=x.extent)
            names = ("q", "q_levels", "q_scale", "query_counts")
            found = attend(
                replace(x, **{name: getattr(own, name) for name in names}, order=None),
                unpack(block_map[heads], x.key_counts.shape[1]),
                scale=self.scale,
            )
            sums[heads] = found.unnormalised[:, :, slots >= 0]
            row_max[heads] = found.row_max[:, :, slots >= 0]
            row_sum[heads] = found.row_sum[:, :, slots >= 0]
        self.stages.attended.append(q)
        return sums, row_max, row_sum

    def score(
        self, exact: Any, q: Tensor, workspace: Tensor, shape: CallShape, kept: Tensor,
        found: Tensor,
    ) -> None:  # fmt: skip
        score_by_reference(exact, q, workspace, shape, self.element, kept, self.scale, found)


@pytest.fixture(params=["two orders", "heads share keys"])
def call(request: pytest.FixtureRequest, make_qkv) -> MeasuredCall:
    """Heads of 40 channels; text is exact."""
    heads = 2 if request.param == "two orders" else 4
    q, k, v = make_qkv(2, heads, GRID.tokens, 40, kv_heads=2)
    k = k + 2 * torch.sin(torch.linspace(0, 60, GRID.tokens)[:, None] + torch.arange(40))
    return measured_call((q, k.bfloat16(), v), grid_order(GRID), [2, 3])


@pytest.fixture
def stages(call: MeasuredCall, monkeypatch: pytest.MonkeyPatch) -> Stages:
    stages = Stages()
    monkeypatch.setattr(module, "Measuring", stages.measuring)
    return stages


FIELDS = ("error", "towards", "far", "norm")


def test_sums_are_those_of_the_reference(call: MeasuredCall, stages: Stages) -> None:
    found, expected = module.on_kernels(call, with_truth=True), measure(call, with_truth=True)
    assert len(stages.attended) == call.candidates.orders, "one launch an order"
    assert (call.tokens == EMPTY).any(), "some rows hold no query"
    size = expected.error + expected.norm[..., None, None]
    for name in FIELDS:
        mine, other = getattr(found, name), getattr(expected, name)
        assert mine.shape == other.shape and mine.dtype == torch.float64
        most = 0.005 * (size if mine.ndim == size.ndim else expected.norm)  # twice what 8 bits err
        assert ((mine - other).abs() <= most).all(), name
    assert float((found.error[..., 0] / found.norm[..., None]).max()) > 0.01, "something drops"
    assert not found.error[..., -1].any() and not found.towards[..., -1].any()
    holds = (call.tokens != EMPTY)[None, None, ..., None]
    assert found.truth is not None and expected.truth is not None
    pairs = (x.float() * holds for x in (found.truth, expected.truth))
    torch.testing.assert_close(*pairs, rtol=0.02, atol=0.02)


def test_groups_of_heads_are_the_whole(call: MeasuredCall, stages: Stages, monkeypatch) -> None:
    whole = module.on_kernels(call, with_truth=True)
    monkeypatch.setattr(module, "_LEAST_BYTES", 1)
    monkeypatch.setattr(module, "_OF_A_CALL", 0)
    grouped = module.on_kernels(call, with_truth=True)
    orders = call.candidates.orders
    assert [len(rows) for rows in stages.attended] == [4] * orders + [2, 2] * orders
    assert max(stages.held[orders:]) < 0.6 * stages.held[0]
    for name in (*FIELDS, "truth"):
        torch.testing.assert_close(getattr(grouped, name), getattr(whole, name))


def test_more_densities_than_the_kernel_has_room_for_are_refused(pretended_gpu) -> None:
    source = (find_csrc() / "score" / "place.cuh").read_text()
    assert f"kMostDensities = {MOST_DENSITIES};" in source
    exact = torch.empty(1, 1, MOST_DENSITIES + 1, 4, 64)
    parts, shape = (exact, exact[..., 0], exact[..., 0]), CallShape(1, 1, 1, 4, 64, 64)
    q = exact[:, :, 0]
    measuring = Measuring(q, q, grid_order(GRID), 1.0)
    with pytest.raises(Unsupported, match="33 densities; up to 32"):
        measuring.score(parts, q, exact, shape, exact, exact[0])
