# SPDX-License-Identifier: Apache-2.0
"""Work of `kernel_measure` around the kernels, with the reference in their place: on a CPU."""

from __future__ import annotations

import importlib
from dataclasses import fields, replace
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
from sparge.order.grid import TokenGrid, cube_order, grid_order
from sparge.reference import Quantized, attend, log_scores, quantize_qkv
from sparge.reference.quantize import count_rows
from sparge.reference.route import rank_blocks
from sparge.stages.rules import AttendRules, OrderFacts, QuantizeRules, RouteRules, Select
from sparge.stages.score import MOST_DENSITIES, score
from sparge.stages.thresholds import COLUMNS
from sparge.stages.workspace import CallShape, WorkspaceLayout
from sparge.tune import (
    BLOCKS_A_CALL,
    CandidateSet,
    Measured,
    MeasuredCall,
    Measurement,
    Workload,
    reference_measure,
)
from sparge.tune.scoring import Distances, squared_errors
from sparge.tune.spread import ROW_STEP
from tests.tune.reference_score import score_by_reference

# By its name: the package has a function of the same one.
module = importlib.import_module("sparge.tune.kernel_measure")

GRID = TokenGrid(4, 8, 15, suffix=20)  # 32 slots of the last query block but the text are empty
CANDIDATES = CandidateSet(densities=(0.1, 0.5, 1.0), pool_weights=(0.0, 0.7, 1.0))


class Stages:
    """The ops that `kernel_measure` calls, in the reference's arithmetic."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.operands: list[Quantized] = []  # of the KV heads of the last workspace
        self.attended: list[Tensor] = []
        self.held: list[int] = []  # bytes of each workspace

    def quantize(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_lengths: None,
        element: int,
        *rest: Any,
    ) -> Tensor:
        *flat, facts, means = rest
        rules, (slot_tokens, _, head_order_kind, *_) = QuantizeRules.of_flat(*flat), facts
        assert element == Element.INT8_FP16 and rules.smooth_k and not rules.with_similarity
        assert head_order_kind is None and means.shape == (3, *k.shape[:2], 64)
        (order_kind,) = (
            index
            for index, tokens in enumerate(self.workload.order.slot_tokens)
            if torch.equal(tokens, slot_tokens[0])
        )
        order, group = self.workload.order, q.shape[1] // k.shape[1]
        layout = WorkspaceLayout(
            CallShape.of(q, k, order.slots),
            Element.INT8_FP16,
            with_queries=rules.with_queries,
            with_pools=rules.with_pools,
        )
        workspace = torch.full((layout.nbytes,), 255, dtype=torch.uint8)  # NaN
        self.held.append(workspace.numel())
        self.operands = []
        for head in range(k.shape[1]):
            own = slice(head, head + 1)
            x = quantize_qkv(
                q[:, head * group : (head + 1) * group],
                k[:, own],
                v[:, own],
                order.of_kind(order_kind),
                element=Element.INT8_FP16,
            )
            self.operands.append(x)
            for name, values in {
                "k_block_mean": x.k_block_mean,
                "key_counts": x.key_counts.unsqueeze(1),
                "k_variance": x.k_variance,
                "v_block_mean": x.v_block_mean,
                "v_variance": x.v_variance,
            }.items():  # of the caller's channels; the rest is padding
                field = layout.view(workspace, name)[:, own]
                field.zero_()[tuple(map(slice, values.shape))] = values
        layout.means(workspace).copy_(means)
        return workspace

    def means(
        self,
        k: Tensor,
        v: Tensor,
        key_lengths: None,
        smooth_k: bool,
        element: int,
        ordered: bool,
    ) -> Tensor:
        assert smooth_k and ordered
        operands = quantize_qkv(k, k, v, element=Element(element))
        found = torch.stack([operands.kbar, operands.vbar, operands.v_scale])
        return pad(found, (0, 64 - found.shape[-1]))

    def route(
        self, workspace: Tensor, shape: list[int], element: int, with_pools: bool, *rest: Any
    ) -> Tensor:
        *flat, _, block_mask, thresholds, facts, counters, q_means, q_similarity = rest
        rules, order = RouteRules.of_flat(*flat), OrderFacts(*facts)
        assert (rules.select, rules.causal, rules.upstream) == (Select.TOPK, False, False)
        assert block_mask is order.queries_exact is order.slot_counts is counters is None
        assert order.keys_exact is not None
        layout = WorkspaceLayout(
            CallShape(*shape),
            Element(element),
            with_queries=False,
            with_pools=with_pools,
        )
        assert layout.nbytes == workspace.numel()
        assert q_means.shape == (*shape[:2], layout.shape.query_blocks, 64)
        assert q_means.is_contiguous() and q_similarity.numel() >= q_means[..., 0].numel()
        assert (q_similarity > -1).all()
        names = ("k_block_mean", "k_variance", "v_block_mean", "v_variance")
        facts_of_blocks: Any = SimpleNamespace(
            q_block_mean=q_means,
            key_counts=layout.view(workspace, "key_counts")[:, 0],
            **{name: layout.view(workspace, name) for name in names},
        )
        valid = (facts_of_blocks.key_counts > 0)[:, None, None]
        forced = order.keys_exact
        assert (thresholds[:, COLUMNS.index("router")] == Router.ERROR).all()
        _, scores = log_scores(facts_of_blocks, rules.score_scale, valid)
        rank = rank_blocks(scores.masked_fill(~valid | forced, -torch.inf))
        share = thresholds[:, COLUMNS.index("selection")]
        asked = (share * scores.shape[-1]).long().clamp(min=rules.floor)[:, None, None]
        wanted = whole_steps(asked, (valid & forced).sum(-1, keepdim=True))
        kept = valid & (forced | (rank < wanted))
        return pack(kept)

    def attend(self, q: Tensor, workspace: Tensor, block_map: Tensor, *rest: Any) -> None:
        shape, _, *flat, lengths, _, facts, out, _, sums, row_max, row_sum, _ = rest
        rules, (slots,) = AttendRules.of_flat(*flat), facts[0]
        assert not (rules.with_pools or rules.pv_filter or rules.causal)
        every_row = q.new_zeros(*q.shape[:2], shape[3], q.shape[-1])
        every_row[:, :, slots >= 0] = q[:, :, slots[slots >= 0]]
        assert shape[0] == q.shape[0] and shape[2] == 1
        assert lengths is None
        assert out.shape == q.shape and out.data_ptr() != q.data_ptr()
        for head, x in enumerate(self.operands):
            heads = slice(head, None, len(self.operands))  # batch entries are KV heads
            rows = every_row[heads]
            own = quantize_qkv(rows, rows, rows, element=Element.INT8_FP16)
            of_queries = ("q_levels", "q_scale", "q_dot_kbar")
            found = attend(
                replace(
                    x,
                    **{name: getattr(own, name) for name in of_queries},
                    order=None,
                    query_counts=count_rows(rows.shape[2], rows.device),
                ),
                unpack(block_map[heads], x.key_counts.shape[1]),
                scale=rules.scale,
            )
            sums[heads] = found.unnormalised[:, :, slots >= 0]
            row_max[heads] = found.row_max[:, :, slots >= 0]
            row_sum[heads] = found.row_sum[:, :, slots >= 0]
        self.attended.append(q)


@pytest.fixture(params=["cubes", "order_kinds"])
def sample(request: pytest.FixtureRequest, make_qkv) -> MeasuredCall:
    """Four heads over two KV heads, of 40 channels; text is exact."""
    order_kinds = request.param == "order_kinds"
    workload = Workload(grid_order(GRID) if order_kinds else cube_order(GRID))
    q, k, v = make_qkv(2, 4, GRID.tokens, 40, kv_heads=2)
    k = k + 2 * torch.sin(torch.linspace(0, 60, GRID.tokens)[:, None] + torch.arange(40))
    blocks = workload.sparse_query_blocks()[-2:]
    k = k.bfloat16()
    measured = range(2 if order_kinds else 1)
    return MeasuredCall(q, k, v, blocks, workload, CANDIDATES, 40**-0.5, measured, 2)


@pytest.fixture
def stages(sample: MeasuredCall, monkeypatch: pytest.MonkeyPatch) -> Stages:
    stages = Stages(sample.workload)
    names = ("means", "quantize", "route", "attend")
    own = {name: getattr(stages, name) for name in names}
    ops = SimpleNamespace(**own, score=score_by_reference)
    monkeypatch.setattr(module, "ops", ops)
    monkeypatch.setattr(module, "element_of", lambda *_: Element.INT8_FP16)
    return stages


def errors(measured: Measured) -> Tensor:
    """(densities, token orders, heads, pool weights) relative."""
    distances, empty = measured.distances, ~measured.occupied
    found = squared_errors(distances, torch.tensor(CANDIDATES.pool_weights).log())
    sums = found.masked_fill(empty.unsqueeze(-1), 0).sum((2, 4, 5))
    return (sums / distances.norm.masked_fill(empty, 0).sum((1, 3, 4)).unsqueeze(-1)).sqrt()


def test_errors_are_those_of_the_reference(sample: MeasuredCall, stages: Stages) -> None:
    found, expected = module.kernel_measure(sample), reference_measure(sample)
    assert found.occupied.shape == (2, QUERY_BLOCK // 2)
    assert torch.equal(found.occupied, expected.occupied)
    assert not found.occupied.all()
    assert len(stages.attended) == len(sample.order_kinds), "one launch an order"
    # Pseudo-keys: INT8 there, FP16 here.
    torch.testing.assert_close(errors(found), errors(expected), rtol=5e-3, atol=1e-4)
    for each in fields(Distances):
        here, there = (getattr(x.distances, each.name)[..., x.occupied] for x in (found, expected))
        rounding = 0.01 * float(there[there.isfinite()].abs().mean())
        torch.testing.assert_close(here, there, rtol=0.01, atol=rounding, msg=each.name)
    assert float(errors(found)[0].max()) > 0.1, "the least dense candidates drop something"


def test_groups_of_heads_are_the_whole(
    sample: MeasuredCall, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = module.kernel_measure(sample)
    monkeypatch.setattr(module, "_room", lambda call: 1)
    grouped = module.kernel_measure(sample)
    order_kinds = len(sample.order_kinds)
    assert [len(rows) for rows in stages.attended] == [4] * order_kinds + [2, 2] * order_kinds
    assert max(stages.held[order_kinds:]) < 0.6 * stages.held[0]
    assert torch.equal(grouped.occupied, whole.occupied)
    for each in fields(Distances):
        torch.testing.assert_close(
            getattr(grouped.distances, each.name), getattr(whole.distances, each.name)
        )


MOCHI = TokenGrid(28, 30, 53, suffix=256)
WAN_720P = TokenGrid(21, 45, 80)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize(
    ("grid", "heads", "head_dim", "most_groups"),
    [
        (MOCHI, 24, 128, 2),
        (WAN_720P, 40, 128, 2),
        (TokenGrid(13, 30, 45, prefix=226), 48, 64, 2),
        (TokenGrid(33, 45, 80, prefix=256), 24, 128, 2),
        (TokenGrid(1, 64, 64, suffix=512), 24, 128, 2),
    ],
    ids=["mochi", "wan 720p", "cogvideox 5b", "hunyuan", "flux"],
)
def test_a_measurement_takes_no_more_memory_than_a_sparse_call(
    monkeypatch: pytest.MonkeyPatch,
    grid: TokenGrid,
    heads: int,
    head_dim: int,
    most_groups: int,
    calls: int,
) -> None:
    """Short sequences, whose sparse calls take little, may take 83 MB."""
    monkeypatch.setattr(module, "element_of", lambda *_: Element.INT8_E4M3)
    q = torch.empty(1, heads, grid.tokens, head_dim, dtype=torch.bfloat16, device="meta")
    workload = Workload(grid_order(grid))
    run = Measurement.begin(layers=1, heads=heads, workload=workload)
    sampled = run.next_query_blocks(0, calls)
    assert len(sampled) == calls * BLOCKS_A_CALL
    order_kinds = run.order_kinds[0]
    sample = MeasuredCall(q, q, q, sampled, workload, run.candidates, 1.0, order_kinds, ROW_STEP)
    groups = list(module._head_groups(sample))
    sizes = [group.stop - group.start for group in groups]
    assert sum(sizes) == heads
    assert len(groups) <= most_groups, "few launches"
    taken = module._bytes_of_all_heads(sample) + max(sizes) * module._bytes_a_kv_head(sample)
    keys_and_values = 2 * heads * workload.order.slots * head_dim
    assert max(taken, _bytes_of_scores(sample, run.candidates)) <= max(1.4 * keys_and_values, 83e6)


def test_more_densities_than_the_kernel_has_room_for_are_refused() -> None:
    source = (find_csrc() / "score" / "place.cuh").read_text()
    assert f"kMostDensities = {MOST_DENSITIES};" in source
    exact = torch.empty(1, 1, MOST_DENSITIES + 1, 4, 64)
    parts, shape = (exact, exact[..., 0], exact[..., 0]), CallShape(1, 1, 1, 4, 64, 64)
    with pytest.raises(Unsupported, match="33 densities; up to 32"):
        score(parts, exact[:, :, 0], exact, shape, Element.INT8_FP16, exact, 1.0, exact[0])


def _bytes_of_scores(sample: MeasuredCall, candidates: CandidateSet) -> int:
    """Bytes of what is found of all rows, and of what `squared_errors` makes of it: all gains, and
    two more tensors of those above 0."""
    batch, heads, *_ = sample.q.shape
    densities, pool_weights = candidates.shape
    rows = batch * heads * len(sample.order_kinds) * module._compared(sample)
    mixes = 2 * (densities - 1) * (pool_weights - 1)
    return 4 * rows * (Distances.packed_fields(densities) + densities * pool_weights + mixes)
