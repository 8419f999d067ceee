# SPDX-License-Identifier: Apache-2.0
"""Contract of a call beside its numbers: launches, synchronisations, memory, streams, graphs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import sparge
from sparge import (
    AttentionStats,
    HeadSettings,
    Precision,
    Router,
    SparsePolicy,
    TokenGrid,
    Unsupported,
    grid_order,
    reference,
)
from sparge.blocks import KEY_BLOCK, QUERY_BLOCK
from sparge.common.metrics import rel_l2
from sparge.kernels import Element, KernelSpec, capabilities, native_element
from sparge.order.facts import NO_ORDER
from sparge.stages.rules import AttendRules, QuantizeRules, RouteRules, Select
from sparge.stats import Counter

pytestmark = pytest.mark.gpu

HALF = SparsePolicy(topk=0.5, pvthreshd=15.0)


def draw(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def qkv(generator: torch.Generator, heads: int = 4, tokens: int = 1000, head_dim: int = 128):
    return tuple(draw(1, heads, tokens, head_dim, generator=generator) for _ in range(3))


def trace(work: Callable[[], object]) -> list:
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        work()
    return list(profiler.events() or ())


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("pool_weight", [None, 0.0, 0.5])
def test_four_launches_no_sync_no_copy(
    pool_weight: float | None, ordered: bool, generator: torch.Generator
) -> None:
    q, k, v = qkv(generator)
    stats = AttentionStats("cuda")
    order = grid_order(TokenGrid(5, 10, 18, suffix=100)) if ordered else None
    head_settings = (
        None
        if pool_weight is None
        else HeadSettings.uniform(4, 0.3, pool_weight, Router.ERROR, "cuda")
    )
    if head_settings is not None and ordered:
        order_kind = torch.tensor([0, 1, 1, 0], dtype=torch.int32, device="cuda")
        output_scale = torch.tensor([0.75, 0.5, 1.5, 4.5], device="cuda")
        head_settings = replace(head_settings, order_kind=order_kind, output_scale=output_scale)

    def attend() -> object:
        return sparge.attention(
            q, k, v, HALF, stats=stats, return_lse=True, order=order, head_settings=head_settings
        )

    attend()
    torch.cuda.synchronize()
    nothing = trace(lambda: None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call = trace(attend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_device = [event.name for event in call if event.device_type.name == "CUDA"]
    assert sorted(on_device) == [own_attend(), "means", "quantize", "route"]
    waits = ["Synchronize" in event.name for event in call]
    profilers_own = ["Synchronize" in event.name for event in nothing]
    assert sum(waits) == sum(profilers_own)


def e4m3() -> bool:
    """Whether this GPU's 8-bit precision rounds P and V to E4M3, written down likewise."""
    return capabilities("cuda").arch in ("sm_89", "sm_90a", "sm_120a", "sm_121a")


def rounding() -> float:
    """Relative L2 error of noise attended to by noise, where no error averages out.

    P and V each lose up to 2^-4 in E4M3 (an H200 reached 0.040) and 2^-11 in FP16; INT8 scores
    lose 0.02.
    """
    return 0.06 if e4m3() else 0.03


def own_attend(on_hopper: str = "attend_hopper") -> str:
    """The attend entry of this GPU's 8-bit precision, written down apart from the library."""
    return on_hopper if capabilities("cuda").arch == "sm_90a" else "attend"


def test_a_plan_saves_its_launch(generator: torch.Generator, launched: list[KernelSpec]) -> None:
    q, k, v = qkv(generator)
    plan = sparge.make_plan(q, k, HALF)
    assert [spec.entry for spec in launched] == ["means", "quantize", "route"]
    launched.clear()
    sparge.attention(q, k, v, HALF, plan=plan)
    assert [spec.entry for spec in launched] == ["means", "quantize", own_attend()]


def test_the_path_that_was_asked_for_runs(
    generator: torch.Generator, launched: list[KernelSpec]
) -> None:
    arch = capabilities("cuda").arch
    native = Element.INT8_E4M3 if e4m3() else Element.INT8_FP16
    for dtype, precision, entry, element in (
        (torch.bfloat16, Precision.INT8, own_attend(), native),
        (torch.bfloat16, Precision.INT8_FP16, "attend", Element.INT8_FP16),
        (torch.bfloat16, Precision.SIXTEEN_BIT, own_attend("attend_hopper16"), Element.BF16),
        (torch.float16, Precision.SIXTEEN_BIT, own_attend("attend_hopper16"), Element.FP16),
    ):
        for head_dim, padded in ((40, 64), (64, 64), (96, 128), (128, 128)):
            launched.clear()
            q, k, v = (draw(1, 2, 200, head_dim, generator=generator, dtype=dtype) for _ in "qkv")
            sparge.attention(q, k, v, SparsePolicy(precision=precision, pvthreshd=9.0))
            assert launched[-1] == KernelSpec(entry, arch, padded, element, True)
            sparge.attention(q, k, v, SparsePolicy(precision=precision))
            assert launched[-1] == KernelSpec(entry, arch, padded, element, False)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [17776, 44776, 119056])
def test_extra_memory(tokens: int, head_dim: int) -> None:
    """It is at most 0.55 x (q + k + v) beyond the output."""
    q, k, v = (
        torch.randn(1, tokens, 4, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(3)
    )
    sparge.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], HALF)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = sparge.attention(q, k, v, HALF, out_layout="NHD")
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    assert extra <= 0.55 * 3 * q.numel() * q.element_size()


def test_head_groups_give_the_same_bits(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, launched: list[KernelSpec]
) -> None:
    q = draw(2, 6, 500, 64, generator=generator)
    k, v = (draw(2, 3, 500, 64, generator=generator) for _ in range(2))
    output_scale = torch.tensor([0.5, 0.5625, 0.75, 1.5, 0.53125, 0.625], device="cuda")
    plain = HeadSettings.uniform(6, 0.5, device="cuda")
    head_settings = replace(plain, output_scale=output_scale)
    alone = AttentionStats("cuda")
    whole, lse = sparge.attention(
        q, k, v, HALF, head_settings=head_settings, return_lse=True, stats=alone
    )
    assert not torch.equal(whole, sparge.attention(q, k, v, HALF, head_settings=plain))
    launched.clear()
    assert torch.equal(whole, sparge.attention(q, k, v, HALF, head_settings=head_settings))
    assert len(launched) == 4
    launched.clear()
    pipeline = importlib.import_module("sparge.stages.pipeline")
    monkeypatch.setattr(pipeline, "MEMORY_SHARE", 0.2)
    monkeypatch.setattr(pipeline, "MEMORY_FLOOR", 0)
    stats = AttentionStats("cuda")
    grouped, grouped_lse = sparge.attention(
        q, k, v, HALF, head_settings=head_settings, return_lse=True, stats=stats
    )
    assert len(launched) > 4
    assert torch.equal(whole, grouped) and torch.equal(lse, grouped_lse)
    assert stats.density == pytest.approx(alone.density)


def test_no_memory_for_one_head_is_a_reason(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def full(*_: object, **__: object) -> Tensor:
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(importlib.import_module("sparge.stages.ops"), "quantize", full)
    with pytest.raises(Unsupported, match="do not fit in the GPU's free memory"):
        q, k, v = qkv(generator)
        sparge.attention(q, k, v, HALF)
    assert len(tries) == 3, "4 heads, 2 heads, 1 head"


def test_current_stream(generator: torch.Generator) -> None:
    """Work is queued behind what the current stream is still computing."""
    q, k, v = qkv(generator)
    truth = sparge.attention(q, k, v, HALF)
    late = torch.zeros_like(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = sparge.attention(late, k, v, HALF)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, truth)


def test_cuda_graph(generator: torch.Generator) -> None:
    q, k, v = qkv(generator)
    sparge.attention(q, k, v, HALF)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparge.attention(q, k, v, HALF)
    q.copy_(draw(*q.shape, generator=generator))
    graph.replay()
    assert torch.equal(out, sparge.attention(q, k, v, HALF))


def test_torch_compile_without_a_break(generator: torch.Generator) -> None:
    q, k, v = qkv(generator)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparge.attention(q * 2, k, v, HALF, out_layout="NHD").flatten(2) + 1

    truth = sparge.attention(q * 2, k, v, HALF, out_layout="NHD").flatten(2) + 1
    assert torch.equal(layer(q, k, v), truth)


@pytest.mark.parametrize("native", [False, True], ids=["int8-fp16", "native"])
def test_ops_pass_opcheck(generator: torch.Generator, native: bool) -> None:
    q, k, v = qkv(generator, tokens=300)
    own = native_element(capabilities("cuda").arch, False, q.dtype)
    element = int(own if native else Element.INT8_FP16)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    ops = torch.ops.sparge
    int8 = int(Element.INT8_FP16)
    torch.library.opcheck(ops.means, (k, v, None, True, int8), test_utils=checks)
    given = {"means": ops.means(k, v, None, True, int8)}
    order = NO_ORDER.flat()
    quantize = (*QuantizeRules().flat(), order)
    torch.library.opcheck(ops.quantize, (q, k, v, None, int8, *quantize), given, test_utils=checks)
    torch.library.opcheck(ops.quantize, (q, k, v, None, element, *quantize), test_utils=checks)
    workspace = ops.quantize(q, k, v, None, element, *quantize)
    shape = [1, 4, 4, 300, 300, 128]
    top_two = RouteRules(int(Select.TOPK), 2, 1.0, -0.1, 0.09, False, False, True, 0, 0).flat()
    route = (workspace, shape, element, True, False, *top_two, None, None, None, order)
    counters = torch.zeros(len(Counter), dtype=torch.int64, device="cuda")
    torch.library.opcheck(ops.route, (*route, counters), test_utils=checks)
    block_map, _ = ops.route(*route, None)
    rules = AttendRules(True, False, 0.09, 50.0, pv_filter=False, causal=False).flat()
    attend = (q, workspace, block_map, shape, element, *rules, None, None, order)
    torch.library.opcheck(
        ops.attend, (*attend, torch.empty_like(q), None, None, None, None, None), test_utils=checks
    )


def test_offsets_beyond_two_to_the_31(generator: torch.Generator) -> None:
    """A head that starts 2^31 elements into the tensor, and tokens that lie 2^31 elements apart."""
    tokens, head_dim = 300, 64
    memory = torch.empty(2**31 + 2 * tokens * head_dim, dtype=torch.bfloat16, device="cuda")
    q, k, v = qkv(generator, heads=2, tokens=tokens, head_dim=head_dim)
    truth = sparge.attention(q, k, v, HALF)
    far = memory.as_strided((1, 2, tokens, head_dim), (0, 2**31, head_dim, 1))
    for name, near in (("q", q), ("k", k), ("v", v)):
        far.copy_(near)
        inputs = {"q": q, "k": k, "v": v, name: far}
        out = sparge.attention(inputs["q"], inputs["k"], inputs["v"], HALF)
        assert torch.equal(out, truth)
    step = 2**31 // tokens // 8 * 8
    apart = memory.as_strided((1, 1, tokens, head_dim), (0, 0, step, 1))
    apart.copy_(k[:, :1])
    one = sparge.attention(q[:, :1], apart, v[:, :1], HALF)
    assert torch.equal(one, sparge.attention(q[:, :1], k[:, :1], v[:, :1], HALF))


@pytest.mark.parametrize("tokens", [17776, 119056])
def test_long_sequences(tokens: int, generator: torch.Generator) -> None:
    """A few query blocks of a long sequence against float32 over exactly their blocks."""
    q, k, v = qkv(generator, heads=1, tokens=tokens, head_dim=64)
    policy = SparsePolicy(topk=0.05)
    plan = sparge.make_plan(q, k, policy)
    out = sparge.attention(q, k, v, policy, plan=plan)
    assert torch.isfinite(out).all()
    kept = plan.kept()
    assert (kept.sum(-1) == max(1, int(0.05 * kept.shape[-1]))).all()
    for block in (0, kept.shape[2] // 2, kept.shape[2] - 1):
        rows = slice(block * QUERY_BLOCK, min((block + 1) * QUERY_BLOCK, tokens))
        keys = kept[0, 0, block].repeat_interleave(KEY_BLOCK)[:tokens]
        exact, _ = reference.exact_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys])
        assert rel_l2(out[:, :, rows], exact) < rounding()
