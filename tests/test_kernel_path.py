# SPDX-License-Identifier: Apache-2.0
"""What kernels are told, on a machine without them: parameters, runs of blocks, groups of heads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
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
from sparge.kernels import Element
from sparge.kernels.params import HOPPER_ATTEND
from sparge.kernels.warmup import Needs, eight_bit_specs
from sparge.session.measure_kernels import on_kernels
from sparge.stages import on_reference, prepared
from sparge.stages.key_mean import LEAST_KEYS, STRIDE
from sparge.stages.kind import CallTensors, TensorFacts
from sparge.stages.quantize_grid import LONGEST_AXIS, QuantizeGrid
from sparge.stages.workspace import CallShape, WorkspaceLayout
from tests.pretended_gpu import PretendedGpu
from tests.session.parts import measured_call

attention: Any = sparge.attention
GRID = TokenGrid(4, 10, 16)
HEADS, KV_HEADS = 6, 2
#: Elements of two bytes in a load of 16.
LOAD = 8
TOPK, CDF, MASK = 0, 1, 2  # `Select` of csrc/params.cuh


@pytest.mark.parametrize("given", ["thresholds", "mask", "head settings"])
@pytest.mark.parametrize("step", [1, 2])
def test_groups_of_heads_give_what_all_heads_give(
    make_qkv, pretended_gpu: PretendedGpu, monkeypatch, given: str, step: int
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

    def queue(self: Any, tensors: CallTensors, out: Tensor, lse: Tensor) -> None:
        groups.append(tensors.k.shape[1])
        assert tensors.q.shape[1] == tensors.k.shape[1] * HEADS // KV_HEADS
        result, sums = on_reference.attend(tensors, self.kind.rules, None)
        (out if groups[-1] < KV_HEADS else out.transpose(1, 2)).copy_(result)
        lse.copy_(sums)

    def attend(heads_at_once: int) -> tuple[Tensor, Tensor, Tensor]:
        groups.clear()
        stats = AttentionStats("cpu")
        prepared._kept.clear()
        monkeypatch.setattr(prepared, "_heads_at_once", lambda *_: heads_at_once)
        named = {"stats": stats, "return_lse": True, "out_layout": "NHD", **options}
        return (*attention(q, k, v, **named), stats.counters)

    monkeypatch.setattr(prepared.PreparedCall, "queue", queue)
    whole = attend(KV_HEADS)
    assert groups == [KV_HEADS]
    parts = attend(step)
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
    view = TensorFacts.of(x).view(x.data_ptr())
    assert (view.batch_stride, view.head_stride, view.token_stride) == tuple(steps.values())
    assert view.data == x.data_ptr()
    assert bool(view.vectorized) is (odd == "nothing")


def test_the_mean_key_is_sampled_in_long_orders_alone(pretended_gpu: PretendedGpu) -> None:
    for frames, ordered, stride in ((2, True, STRIDE), (1, True, 1), (2, False, 1)):
        order = grid_order(TokenGrid(frames, 64, 64))
        assert (order.tokens >= LEAST_KEYS) == (frames == 2)
        q = torch.zeros(1, 1, order.tokens, 64, dtype=torch.bfloat16)
        pretended_gpu.launched.clear()
        attention(q, q, q, order=order if ordered else None)
        assert pretended_gpu.of_entry("means").params.k_stride == stride


@pytest.fixture
def told(pretended_gpu: PretendedGpu) -> Any:
    """told(policy, tokens, **options): the parameters of each launch of a call, by its entry."""

    def run(policy: SparsePolicy, tokens: int = GRID.tokens, **options: Any) -> dict[str, Any]:
        q = torch.zeros(1, 2, tokens, 64, dtype=torch.bfloat16)
        pretended_gpu.launched.clear()
        attention(q, q, q, policy, scale=0.125, **options)
        return {each.spec.entry: each.params for each in pretended_gpu.launched}

    return run


def test_what_a_policy_says_reaches_the_kernels(told) -> None:
    policy = SparsePolicy(
        topk=0.5, cdfthreshd=0.875, simthreshd1=0.25, pvthreshd=15.0, attention_sink=True,
        keep_diagonal=False, exact_prefix=3, exact_suffix=5, smooth_k=False,
    )  # fmt: skip
    params = told(policy, is_causal=True)
    for entry, expected in {
        "means": {"smooth_k": False},
        "quantize": {"with_queries": True, "with_similarity": True},
        "route": {
            "cdfthreshd": 0.875, "simthreshd1": 0.25, "score_scale": 0.125, "causal": True,
            "attention_sink": True, "keep_diagonal": False, "exact_prefix": 3, "exact_suffix": 5,
            "select": TOPK, "topk_blocks": 5, "upstream": True, "rows_per_cta": 16,
        },
        HOPPER_ATTEND: {"scale": 0.125, "pvthreshd": 15.0, "causal": True, "tokens": GRID.tokens},
    }.items():  # fmt: skip
        assert {name: getattr(params[entry], name) for name in expected} == expected
    assert "attend" not in params
    told_fp16 = told(replace(policy, precision=Precision.INT8_FP16), is_causal=True)
    assert "attend" in told_fp16, "FP16 values have no kernel with wgmma"


@pytest.mark.parametrize("mixed", [None, 0, 1, 2])
def test_fp16_products_are_of_fp16_alone(make_qkv, pretended_gpu: PretendedGpu, mixed) -> None:
    """fp16 holds nothing beyond 65,504, bf16 does: inputs of two types are multiplied as bf16."""
    qkv = list(make_qkv(dtype=torch.float16))
    if mixed is not None:
        qkv[mixed] = qkv[mixed].bfloat16()
    attention(*qkv, SparsePolicy(precision=Precision.SIXTEEN_BIT))
    expected = Element.FP16 if mixed is None else Element.BF16
    specs = [each.spec for each in pretended_gpu.launched]
    assert {spec.element for spec in specs if spec.reads_element} == {expected}


@pytest.mark.parametrize(
    ("blocks", "words"), [(10, 1 + 1 + 1), (33, 2 + 1 + 1), (2049, 65 + 2 + 1)]
)
def test_a_list_has_a_bit_a_key_block_and_a_bit_a_tile_and_a_word_that_ends_it(
    told, pretended_gpu: PretendedGpu, blocks: int, words: int
) -> None:
    """In words of 32, as csrc/attend/block_list.cuh writes them; a tile is 64 key blocks."""
    policy = SparsePolicy(topk=0.5, precision=Precision.INT8_FP16)
    told(policy, tokens=64 * blocks)
    assert pretended_gpu.of_entry("attend").extra_shared == 4 * words


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
    told, given: dict[str, Any], scores: bool, similar: bool
) -> None:
    """A tensor's values are not known without waiting for the GPU. A call that keeps every block
    needs none, as far as the host knows: head settings have the last word."""

    def asked(**options: Any) -> tuple[bool, bool]:
        params = told(SparsePolicy(**given), **options)["quantize"]
        return bool(params.with_queries), bool(params.with_similarity)

    assert asked() == (scores, similar)
    assert asked(block_mask=torch.ones(1, 2, 5, 10, dtype=torch.bool)) == (False, False)
    if "select_by" not in given:
        assert asked(head_settings=HeadSettings.uniform(2, 0.3))[0]


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
    told, given: dict[str, Any], causal: bool, head_settings: Any, routed: bool
) -> None:
    options = {"is_causal": causal, "head_settings": head_settings}
    params = told(SparsePolicy(**given), **options)
    assert ("route" in params) == routed == bool(params[HOPPER_ATTEND].block_map)
    stats = AttentionStats("cpu")
    assert told(SparsePolicy(**given), stats=stats, **options)["route"].counters


@pytest.mark.parametrize("given", ["is_causal", "key_lengths", "stats", "block_mask"])
def test_a_call_that_ranks_nothing_has_no_room_for_scores(pretend_gpu, given: str) -> None:
    """However long it is."""
    gpu, blocks = pretend_gpu("sm_89"), 20_000
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(-1, -1, 64 * blocks, -1)
    attention(q, q, q, SparsePolicy(topk=1.0), **{given: {
        "is_causal": True,
        "key_lengths": torch.tensor([100], dtype=torch.int32),
        "stats": AttentionStats("cpu"),
        "block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(-1, -1, blocks // 2, blocks),
    }[given]})  # fmt: skip
    assert gpu.of_entry("route").extra_shared == 0
    with pytest.raises(Unsupported, match="whose scores do not fit"):
        attention(q, q, q, SparsePolicy(topk=0.5))


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_103a"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_warm_up_has_the_kernels_of_calls(make_qkv, pretend_gpu, arch: str, dtype) -> None:
    """Also of 16-bit inputs of a type that nobody said."""
    gpu = pretend_gpu(arch)
    attention(*make_qkv(dtype=dtype))
    for needs in {Needs(64, dtype), Needs(64, None if dtype.itemsize == 2 else dtype)}:
        assert {*gpu.loaded} <= {*eight_bit_specs(arch, needs)}


@pytest.mark.parametrize("order", [None, grid_order(GRID)], ids=["as they come", "ordered"])
@pytest.mark.parametrize("head_settings", [None, HeadSettings.uniform(2, 0.3)], ids=["", "tuned"])
def test_orders_reach_the_kernels_and_upstreams_semantics_are_of_plain_calls_alone(
    told, order, head_settings
) -> None:
    """A block's mass counts its keys with an order or head settings, and lists have whole steps."""
    route = told(SparsePolicy(topk=0.3), order=order, head_settings=head_settings)["route"]
    assert bool(route.upstream) == (order is None and head_settings is None)
    for name in ("keys_exact", "queries_exact"):
        lies_at = None if order is None else getattr(order, name).data_ptr()
        assert getattr(route, name) == lies_at


@pytest.mark.parametrize("element", Element)
@pytest.mark.parametrize("pools", [False, True])
def test_intermediates_lie_one_after_another(element: Element, pools: bool) -> None:
    layout = WorkspaceLayout(CallShape(2, 4, 2, 300, 700, 96), element, True, pools, True)
    fields = list(layout.fields.values())
    for field, following in pairwise(fields):
        assert field.offset + field.nbytes <= following.offset and following.offset % 256 == 0
    assert fields[-1].offset + fields[-1].nbytes <= layout.nbytes
    assert ("pool_k" in layout.fields) == pools
    workspace = torch.empty(layout.nbytes, dtype=torch.uint8)
    views = {name: layout.view(workspace, name).data_ptr() for name in layout.fields}
    assert layout.addresses(workspace.data_ptr()) == views


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


def test_every_parameter_of_a_measurement_is_given(make_qkv, pretended_gpu: PretendedGpu) -> None:
    qkv = make_qkv(1, 2, GRID.tokens, 64)
    on_kernels(measured_call(qkv, grid_order(GRID), (0, 2)), with_truth=True)
    entries = [each.spec.entry for each in pretended_gpu.launched]
    assert entries == ["means", *2 * ["quantize", "route", "attend_hopper", "score"]]
