# SPDX-License-Identifier: Apache-2.0
"""Work of measuring around the kernels, with torch in their place: on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from sparge import Unsupported
from sparge.blocks import KEY_BLOCK, QUERY_BLOCK, pack, unpack, whole_steps
from sparge.head_settings import Router
from sparge.kernels import Element
from sparge.kernels.source import find_csrc
from sparge.order.grid import EMPTY, TokenGrid, TokenOrder, grid_order
from sparge.reference import Operands, log_scores
from sparge.reference.attend import LOG2_E
from sparge.reference.route import rank_blocks
from sparge.session import measure_kernels as module
from sparge.session.measure import MeasuredCall, measure
from sparge.stages.rules import AttendRules, OrderFacts, QuantizeRules, RouteRules, Select
from sparge.stages.score import MOST_DENSITIES, score
from sparge.stages.workspace import CallShape, WorkspaceLayout
from sparge.thresholds import COLUMNS
from tests.session.parts import measured_call
from tests.session.reference_score import score_by_reference

pytestmark = pytest.mark.usefixtures("one_thread")

GRID = TokenGrid(4, 8, 15, suffix=20)  # 32 slots of the last query block but the text are empty


class Stages:
    """The ops of measuring, in float32."""

    score = staticmethod(score_by_reference)

    def __init__(self, order: TokenOrder) -> None:
        self.order = order
        self.attended: list[Tensor] = []
        self.held: list[int] = []  # bytes of each workspace

    def quantize(
        self, q: Tensor, k: Tensor, v: Tensor, key_lengths: None, element: int, *rest: Any
    ) -> Tensor:
        *flat, facts, means = rest
        rules, (slot_tokens, _, head_order_kind, *_) = QuantizeRules.of_flat(*flat), facts
        assert element == Element.INT8_FP16 and rules.smooth_k and not rules.with_similarity
        assert head_order_kind is None and means.shape == (3, *k.shape[:2], 64)
        kinds = enumerate(self.order.slot_tokens)
        (kind,) = (n for n, tokens in kinds if torch.equal(tokens, slot_tokens[0]))
        layout = WorkspaceLayout(
            CallShape.of(q, k, self.order.slots),
            Element.INT8_FP16,
            with_queries=rules.with_queries,
            with_pools=rules.with_pools,
        )
        workspace = torch.full((layout.nbytes,), 255, dtype=torch.uint8)  # NaN
        self.held.append(workspace.numel())
        self.last = x = Operands.of(q, k, v, self.order.of_kind(kind))
        names = "k_block_mean", "k_variance", "v_block_mean", "v_variance"
        values = {name: getattr(x, name) for name in names}
        for name, value in (values | {"key_counts": x.key_counts.unsqueeze(1)}).items():
            # Of the caller's channels; the rest is padding.
            layout.view(workspace, name).zero_()[..., : value.shape[-1]] = value
        layout.means(workspace).copy_(means)
        return workspace

    def means(self, k: Tensor, v: Tensor, key_lengths: None, smooth_k: bool, element: int,
              ordered: bool) -> Tensor:  # fmt: skip
        assert smooth_k and ordered and element == Element.INT8_FP16
        found = torch.stack([k.float().mean(2), v.float().mean(2), torch.ones_like(v[:, :, 0])])
        return pad(found, (0, 64 - found.shape[-1]))

    def route(
        self, workspace: Tensor, shape: list[int], element: int, with_pools: bool, *rest: Any
    ) -> Tensor:
        *flat, _, block_mask, thresholds, facts, counters, q_means, q_similarity = rest
        rules, order = RouteRules.of_flat(*flat), OrderFacts(*facts)
        assert (rules.select, rules.causal, rules.upstream) == (Select.TOPK, False, False)
        assert block_mask is order.queries_exact is order.slot_counts is counters is None
        layout = WorkspaceLayout(
            CallShape(*shape), Element(element), with_queries=False, with_pools=with_pools
        )
        assert layout.nbytes == workspace.numel()
        assert q_means.shape == (*shape[:2], layout.shape.query_blocks, 64)
        assert q_means.is_contiguous() and q_similarity.numel() >= q_means[..., 0].numel()
        names = ("k_block_mean", "k_variance", "v_block_mean", "v_variance")
        facts_of_blocks: Any = SimpleNamespace(
            q_block_mean=q_means,
            key_counts=layout.view(workspace, "key_counts")[:, 0],
            **{name: layout.view(workspace, name).float() for name in names},
        )
        valid, forced = (facts_of_blocks.key_counts > 0)[:, None, None], order.keys_exact
        assert (thresholds[:, COLUMNS.index("router")] == Router.ERROR).all() and forced is not None
        scores = log_scores(facts_of_blocks, rules.score_scale, valid)[1]
        rank = rank_blocks(scores.masked_fill(~valid | forced, -torch.inf))
        share = thresholds[:, COLUMNS.index("selection")]
        asked = (share * scores.shape[-1]).long().clamp(min=rules.floor)[:, None, None]
        wanted = whole_steps(asked, (valid & forced).sum(-1, keepdim=True))
        return pack(valid & (forced | (rank < wanted)))

    def attend(self, q: Tensor, workspace: Tensor, block_map: Tensor, *rest: Any) -> None:
        """Batch entries are KV heads."""
        shape, _, *flat, lengths, _, facts, out, _, sums, row_max, row_sum, _ = rest
        rules, (slots,), x = AttendRules.of_flat(*flat), facts[0], self.last
        assert not (rules.with_pools or rules.pv_filter or rules.causal) and lengths is None
        assert (shape[0], shape[2]) == (q.shape[0], 1) and out.shape == q.shape
        assert out.data_ptr() != q.data_ptr()
        query_block = (slots >= 0).nonzero().squeeze(-1) // QUERY_BLOCK
        kept = unpack(block_map, x.key_counts.shape[1])[:, :, query_block].unsqueeze(-1)
        seen = kept & (torch.arange(KEY_BLOCK) < x.key_counts[0].unsqueeze(-1))
        k = x.k.flatten(0, 1).flatten(1, 2).unsqueeze(1)
        v = (x.v + x.vbar[:, :, None, None]).flatten(0, 1).flatten(1, 2).unsqueeze(1)
        logits = q.float() @ k.mT * rules.scale * LOG2_E
        logits = logits.masked_fill(~seen.flatten(-2), -torch.inf)
        row_max.copy_(logits.amax(-1))
        p = (logits - row_max.nan_to_num(neginf=0.0).unsqueeze(-1)).exp2()
        sums.copy_(p @ v)
        row_sum.copy_(p.sum(-1))
        self.attended.append(q)


@pytest.fixture(params=["two orders", "heads share keys"])
def call(request: pytest.FixtureRequest, make_qkv) -> MeasuredCall:
    """Heads of 40 channels; text is exact."""
    heads = 2 if request.param == "two orders" else 4
    q, k, v = make_qkv(2, heads, GRID.tokens, 40, kv_heads=2)
    k = k + 2 * torch.sin(torch.linspace(0, 60, GRID.tokens)[:, None] + torch.arange(40))
    return measured_call((q, k.bfloat16(), v), grid_order(GRID), [2, 3])


@pytest.fixture
def stages(call: MeasuredCall, monkeypatch: pytest.MonkeyPatch) -> Stages:
    stages = Stages(call.order)
    monkeypatch.setattr(module, "ops", stages)
    monkeypatch.setattr(module, "element_of", lambda *_: Element.INT8_FP16)
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
        most = 1e-4 * (size if mine.ndim == size.ndim else expected.norm)
        assert ((mine - other).abs() <= most).all(), name
    assert float((found.error[..., 0] / found.norm[..., None]).max()) > 0.01, "something drops"
    assert not found.error[..., -1].any() and not found.towards[..., -1].any()
    holds = (call.tokens != EMPTY)[None, None, ..., None]
    assert found.truth is not None and expected.truth is not None
    pairs = (x.float() * holds for x in (found.truth, expected.truth))
    torch.testing.assert_close(*pairs, rtol=2.0**-7, atol=1e-4)


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


def test_more_densities_than_the_kernel_has_room_for_are_refused() -> None:
    source = (find_csrc() / "score" / "place.cuh").read_text()
    assert f"kMostDensities = {MOST_DENSITIES};" in source
    exact = torch.empty(1, 1, MOST_DENSITIES + 1, 4, 64)
    parts, shape = (exact, exact[..., 0], exact[..., 0]), CallShape(1, 1, 1, 4, 64, 64)
    with pytest.raises(Unsupported, match="33 densities; up to 32"):
        score(parts, exact[:, :, 0], exact, shape, Element.INT8_FP16, exact, 1.0, exact[0])
