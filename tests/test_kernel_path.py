# SPDX-License-Identifier: Apache-2.0
"""What kernels are told, on a machine without them: parameters, runs of blocks, groups of heads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from ctypes import Structure
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from sparge import (
    AttentionStats,
    HeadSettings,
    Precision,
    SparsePolicy,
    TokenGrid,
    Unsupported,
    grid_order,
)
from sparge.call import CheckedCall, make_call
from sparge.kernels import Element
from sparge.kernels.params import HOPPER_ATTEND, AttendSizes, MeansSizes, RouteSizes
from sparge.reference.key_mean import LEAST_KEYS, STRIDE
from sparge.stages import on_reference, ops
from sparge.stages.quantize_grid import LONGEST_AXIS, QuantizeGrid
from sparge.stages.rules import NO_ORDER, OrderFacts, QuantizeRules, Select
from sparge.stages.workspace import CallShape, layout_of
from sparge.stats import Counter

launch = importlib.import_module("sparge.stages.launch")
GRID = TokenGrid(4, 10, 16)
HEADS, KV_HEADS = 6, 2
#: Elements of two bytes in a load of 16.
LOAD = 8


@pytest.mark.parametrize("given", ["thresholds", "mask", "head settings"])
@pytest.mark.parametrize("step", [1, 2])
def test_groups_of_heads_give_what_all_heads_give(
    make_qkv, pretended_gpu: ModuleType, monkeypatch, given: str, step: int
) -> None:
    """A group is of kv heads and of the query heads that read them: three each here."""
    q, k, v = make_qkv(2, HEADS, 300, 64, kv_heads=KV_HEADS)
    shares = torch.linspace(0.1, 0.9, HEADS)
    mask = torch.arange(2 * HEADS * 15).view(2, HEADS, 3, 5) % 7 < 4
    head_settings = HeadSettings.uniform(HEADS, 0.3, pool_weight=1.0)
    head_settings = replace(head_settings, density=shares, output_scale=shares + 0.5)
    options: dict[str, Any] = {
        "thresholds": {"policy": SparsePolicy(topk=shares)},
        "mask": {"block_mask": mask},
        "head settings": {"head_settings": head_settings},
    }[given]
    groups: list[int] = []

    def run(call: CheckedCall, out: Tensor, lse: Tensor | None, counters: Tensor | None) -> None:
        groups.append(call.k.shape[1])
        assert call.q.shape[1] == call.k.shape[1] * HEADS // KV_HEADS
        on_reference.run(call, out, lse, counters)

    def attend(limit: int) -> tuple[Tensor, Tensor, Tensor]:
        groups.clear()
        stats = AttentionStats("cpu")
        monkeypatch.setattr(pretended_gpu, "_memory_limit", lambda _: limit)
        named = {"stats": stats, "return_lse": True, "out_layout": "NHD", **options}
        return (*sparge.attention(q, k, v, **named), stats.counters)

    monkeypatch.setattr(pretended_gpu, "run_kernels", run)
    whole = attend(1 << 40)
    assert groups == [KV_HEADS]
    monkeypatch.setattr(pretended_gpu, "_memory_needed", lambda _: 1 << 20)
    parts = attend((1 << 20) * step // KV_HEADS)
    assert groups == [step] * (KV_HEADS // step)
    assert all(map(torch.equal, whole, parts))


@pytest.mark.parametrize("odd", ["nothing", "address", "batch", "head", "token"])
def test_vector_loads_need_whole_steps(odd: str) -> None:
    """A load of 16 bytes at an address that is no multiple of 16 is an error on a GPU."""
    steps = {"batch": 4096, "head": 1024, "token": 64}
    if odd in steps:
        steps[odd] += LOAD // 2
    store = torch.zeros(20_000, dtype=torch.bfloat16)
    x = store.as_strided((2, 3, 5, 64), (*steps.values(), 1), 1 if odd == "address" else 0)
    view = launch.view_of(x)
    assert (view.batch_stride, view.head_stride, view.token_stride) == tuple(steps.values())
    assert view.data == x.data_ptr()
    assert bool(view.vectorized) is (odd == "nothing")


@pytest.fixture
def queued(pretended_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The parameters of every launch, by its entry, and the bytes of lists where it has such;
    nothing is launched."""
    parameters: dict[str, Any] = {}
    sizes = {
        "means": MeansSizes(slices=4),
        "route": RouteSizes(16, 16, 1000),
        "attend": AttendSizes(parts=1),
    }

    def find_kernel(entry: str, *_: object) -> SimpleNamespace:
        return SimpleNamespace(entry=entry, sizes=sizes.get(entry), static_shared=20_000)

    def queue(kernel: SimpleNamespace, grid: object, params: Structure, lists: int = 0) -> None:
        parameters[kernel.entry] = params
        if lists:
            parameters["bytes of lists"] = lists

    monkeypatch.setattr(launch, "find_kernel", find_kernel)
    monkeypatch.setattr(launch, "queue", queue)
    monkeypatch.setattr(launch, "resident_blocks", lambda _: 132)
    return parameters


def test_the_mean_key_is_sampled_in_long_orders_alone(queued: dict[str, Any]) -> None:
    for frames, ordered, stride in ((2, True, STRIDE), (1, True, 1), (2, False, 1)):
        order, facts = grid_order(TokenGrid(frames, 64, 64)), NO_ORDER
        assert (order.tokens >= LEAST_KEYS) == (frames == 2)
        if ordered:
            facts = OrderFacts(order.slot_tokens, order.block_counts)
        q = torch.zeros(1, 1, order.tokens, 64, dtype=torch.bfloat16)
        launch.quantize(q, q, q, None, Element.INT8_E4M3, QuantizeRules(), facts)
        assert queued["means"].k_stride == stride


@pytest.fixture
def run_kernels(
    queued: dict[str, Any], pretended_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """run_kernels(policy, causal, mask, (order, head_settings), tokens, counters): what the ops'
    functions queue."""
    stages = {name: getattr(ops, f"_{name}") for name in ("quantize", "route", "attend")}
    monkeypatch.setattr(pretended_gpu, "ops", SimpleNamespace(**stages))

    def run(
        policy: SparsePolicy,
        causal: bool,
        mask: Any = None,
        others: Any = (),
        tokens: int = GRID.tokens,
        counters: Any = None,
    ) -> Any:
        q = torch.zeros(1, 2, tokens, 64, dtype=torch.bfloat16)
        call = make_call(q, q, q, policy, "HND", causal, 0.125, None, mask, *others)
        pretended_gpu.run_kernels(call, torch.empty_like(q), None, counters)
        return queued

    return run


def test_a_call_that_keeps_everything_is_routed_where_it_is_counted(run_kernels) -> None:
    whole, counters = SparsePolicy(topk=1.0), torch.zeros(len(Counter), dtype=torch.int64)
    assert "route" not in run_kernels(whole, False)
    queued = run_kernels(whole, False, counters=counters)
    assert queued["route"].counters == counters.data_ptr()


def test_what_a_policy_says_reaches_the_kernels(run_kernels) -> None:
    policy = SparsePolicy(
        topk=0.5, cdfthreshd=0.875, simthreshd1=0.25, pvthreshd=15.0, attention_sink=True,
        keep_diagonal=False, exact_prefix=3, exact_suffix=5, smooth_k=False,
    )  # fmt: skip
    queued = run_kernels(policy, True)
    for entry, told in {
        "means": {"smooth_k": False},
        "quantize": {"with_queries": True, "with_similarity": True},
        "route": {
            "select": Select.TOPK, "topk_blocks": 5, "floor": 1, "upstream": True,
            "cdfthreshd": 0.875, "simthreshd1": 0.25, "score_scale": 0.125, "causal": True,
            "attention_sink": True, "keep_diagonal": False, "exact_prefix": 3, "exact_suffix": 5,
            "rows_per_cta": 16,
        },
        HOPPER_ATTEND: {"scale": 0.125, "pvthreshd": 15.0, "causal": True, "tokens": GRID.tokens},
    }.items():  # fmt: skip
        assert {name: getattr(queued[entry], name) for name in told} == told
    assert "attend" not in queued
    told = run_kernels(replace(policy, precision=Precision.INT8_FP16), True)
    assert "attend" in told, "FP16 values have no kernel with wgmma"


@pytest.mark.parametrize(
    ("blocks", "words"), [(10, 1 + 1 + 1), (33, 2 + 1 + 1), (2049, 65 + 2 + 1)]
)
def test_a_list_has_a_bit_a_key_block_and_a_bit_a_tile_and_a_word_that_ends_it(
    run_kernels, blocks: int, words: int
) -> None:
    """In words of 32, as csrc/attend/block_list.cuh writes them; a tile is 64 key blocks."""
    policy = SparsePolicy(topk=0.5, precision=Precision.INT8_FP16)
    assert run_kernels(policy, False, tokens=64 * blocks)["bytes of lists"] == 4 * words


@pytest.mark.parametrize(
    ("given", "scores", "similar"),
    [
        ({"topk": 0.5}, True, False),
        ({"topk": 0.5, "simthreshd1": 0.0}, True, True),
        ({"topk": 0.5, "simthreshd1": torch.tensor([-0.1, -0.1])}, True, True),
        ({"topk": 1.0, "simthreshd1": 0.5}, False, False),
        ({"topk": torch.tensor([1.0, 1.0]), "simthreshd1": 0.5}, True, True),
        ({"select_by": "cdf", "topk": 1.0, "cdfthreshd": 1.0, "simthreshd1": 0.5}, True, True),
    ],
)
def test_scores_and_similarities_are_for_those_who_need_them(
    run_kernels, given: dict[str, Any], scores: bool, similar: bool
) -> None:
    """A tensor's values are not known without waiting for the GPU. A call that keeps every block
    needs none, as far as the host knows: head settings have the last word."""

    def told(**others: Any) -> tuple[bool, bool]:
        params = run_kernels(SparsePolicy(**given), False, **others)["quantize"]
        return bool(params.with_queries), bool(params.with_similarity)

    assert told() == (scores, similar)
    assert told(mask=torch.ones(1, 2, 5, 10, dtype=torch.bool)) == (False, False)
    if "select_by" not in given:
        assert told(others=(None, HeadSettings.uniform(2, 0.3)))[0]


@pytest.mark.parametrize(
    ("given", "causal", "head_settings", "routed"),
    [
        ({"topk": 1.0}, False, None, False),
        ({"topk": 1.0}, True, None, True),
        ({"topk": 0.99}, False, None, True),
        ({"topk": torch.ones(2)}, False, None, True),
        ({"topk": 1.0, "select_by": "cdf"}, False, None, True),
        ({"topk": 1.0}, False, HeadSettings.uniform(2, 0.3), True),
    ],
)
def test_a_call_that_keeps_everything_is_not_routed(
    run_kernels, given: dict[str, Any], causal: bool, head_settings: Any, routed: bool
) -> None:
    queued = run_kernels(SparsePolicy(**given), causal, None, (None, head_settings))
    assert ("route" in queued) == routed
    assert queued[HOPPER_ATTEND].block_map


@pytest.mark.parametrize("order", [None, grid_order(GRID)], ids=["as they come", "ordered"])
@pytest.mark.parametrize("head_settings", [None, HeadSettings.uniform(2, 0.3)], ids=["", "tuned"])
def test_orders_reach_the_kernels_and_upstreams_semantics_are_of_plain_calls_alone(
    run_kernels, order, head_settings
) -> None:
    """A block's mass counts its keys with an order or head settings, and lists have whole steps."""
    told = run_kernels(SparsePolicy(topk=0.3), False, None, (order, head_settings))["route"]
    assert bool(told.upstream) == (order is None and head_settings is None)
    for name in ("keys_exact", "queries_exact"):
        lies_at = None if order is None else getattr(order, name).data_ptr()
        assert getattr(told, name) == lies_at


@pytest.mark.parametrize("element", Element)
@pytest.mark.parametrize("pools", [False, True])
def test_intermediates_lie_one_after_another(element: Element, pools: bool) -> None:
    layout = layout_of(CallShape(2, 4, 2, 300, 700, 96), element, True, pools)
    fields = list(layout.fields.values())
    for field, following in pairwise(fields):
        assert field.offset + field.nbytes <= following.offset and following.offset % 256 == 0
    assert fields[-1].offset + fields[-1].nbytes <= layout.nbytes
    assert ("pool_k" in layout.fields) == pools
    workspace = torch.empty(layout.nbytes, dtype=torch.uint8)
    views = {name: layout.view(workspace, name).data_ptr() for name in layout.fields}
    assert layout.addresses(workspace) == views


def grid_of(shape: CallShape, with_queries: bool = True) -> QuantizeGrid:
    """Grid of a launch of quantize on an H200."""
    return QuantizeGrid.of(shape, 132, with_queries=with_queries)


def test_runs_are_long_where_many_thread_blocks_are_left() -> None:
    for heads, tokens, head_dim, runs in (
        (40, 32760, 128, (8, 4)), (30, 17776, 64, (4, 2)), (24, 4608, 128, (1, 1)),
    ):  # fmt: skip
        grid = grid_of(CallShape(1, heads, heads, tokens, tokens, head_dim))
        assert (grid.key_run, grid.query_run) == runs


@pytest.mark.parametrize(
    "shape",
    [
        CallShape(2, 2048, 2, 1_000_000, 64 * 1000, 128),
        CallShape(1, LONGEST_AXIS - 2, 1, 1000, 1000, 64),
        CallShape(1, 1, 1, 30_000_000, 64, 64),
        CallShape(1, 6, 2, 64 * 21, 64 * 21, 64),
    ],
)
def test_runs_of_whole_heads_fit_the_grid(shape: CallShape) -> None:
    for queries in (False, True):
        found = grid_of(shape, queries)
        group = shape.heads // shape.kv_heads
        held = found.runs - 2 * found.key_runs  # runs of queries
        assert found.heads == shape.batch * shape.kv_heads and found.runs <= LONGEST_AXIS
        assert 0 <= found.key_runs * found.key_run - shape.key_blocks < found.key_run
        blocks, most = group * shape.query_blocks, group * found.query_run
        assert 0 <= held * found.query_run - blocks < most if queries else held == 0


def test_more_heads_of_one_key_head_than_an_axis_are_refused() -> None:
    with pytest.raises(Unsupported, match="65534 query heads share 1 key heads"):
        grid_of(CallShape(1, LONGEST_AXIS - 1, 1, 10, 10, 64))
