# SPDX-License-Identifier: Apache-2.0
"""Contract of a call beside its numbers: launches, synchronisations, memory, streams, graphs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

import sparge
from benchmarks.kept import kept_blocks
from benchmarks.metrics import rel_l2
from sparge import (
    AttentionStats,
    HeadSettings,
    Precision,
    Router,
    SparsePolicy,
    TokenGrid,
    grid_order,
)
from sparge.blocks import KEY_BLOCK, QUERY_BLOCK
from sparge.kernels import Element, KernelSpec, capabilities
from sparge.session.measure import measure
from sparge.stages import op, prepared
from sparge.stats import Counter
from tests.gpu.conftest import HALF, no_waits
from tests.gpu.test_head_settings import settings_of, with_orders
from tests.session.parts import measured_call

pytestmark = pytest.mark.gpu

attention: Any = sparge.attention
Operands = tuple[Tensor, Tensor, Tensor]
GRID = TokenGrid(5, 10, 18, suffix=100)  # 1,000 tokens


@pytest.fixture
def qkv(make_qkv) -> Operands:
    return make_qkv(1, 4, GRID.tokens, 128, device="cuda")


def trace(work: Callable[[], object]) -> list:
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        work()
    return list(profiler.events() or ())


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("settings", ["none", "dropping", "pooling"])
def test_four_launches_no_sync_no_copy(settings: str, ordered: bool, qkv: Operands) -> None:
    stats, order = AttentionStats("cuda"), grid_order(GRID) if ordered else None
    head_settings = None
    if settings != "none":
        pool_weight = 0.5 if settings == "pooling" else 0.0
        head_settings = HeadSettings.uniform(4, 0.3, pool_weight, Router.ERROR, "cuda")
        if ordered:
            output_scale = torch.tensor([0.75, 0.5, 1.5, 4.5], device="cuda")
            head_settings = with_orders(replace(head_settings, output_scale=output_scale))

    def attend() -> object:
        options = {"stats": stats, "order": order, "head_settings": head_settings}
        return attention(*qkv, HALF, return_lse=True, **options)

    attend()
    torch.cuda.synchronize()
    nothing = trace(lambda: None)
    with no_waits():
        call = trace(attend)
    on_device = [event.name for event in call if event.device_type.name == "CUDA"]
    assert sorted(on_device) == [own_attend(), "means", "quantize", "route"]
    waits = ["Synchronize" in event.name for event in call]
    profilers_own = ["Synchronize" in event.name for event in nothing]
    assert sum(waits) == sum(profilers_own)


def e4m3() -> bool:
    """Whether this GPU's 8-bit precision rounds P and V to E4M3, written down likewise."""
    return capabilities("cuda").arch == "sm_90a"


def integer() -> bool:
    """Whether it rounds them to integers."""
    return capabilities("cuda").arch.endswith(("86", "89", "120", "120a", "121a"))


def own_attend(on_hopper: str = "attend_hopper") -> str:
    """The attend entry of this GPU's 8-bit precision, written down apart from the library."""
    return on_hopper if capabilities("cuda").arch == "sm_90a" else "attend"


def test_the_path_that_was_asked_for_runs(make_qkv, launched: list[KernelSpec]) -> None:
    arch = capabilities("cuda").arch
    eight_bit = Element.INT8_INT8 if integer() else Element.INT8_FP16
    native = Element.INT8_E4M3 if e4m3() else eight_bit
    for dtype, precision, entry, element in (
        (torch.bfloat16, Precision.INT8, own_attend(), native),
        (torch.bfloat16, Precision.INT8_FP16, "attend", Element.INT8_FP16),
        (torch.bfloat16, Precision.SIXTEEN_BIT, own_attend("attend_hopper16"), Element.BF16),
        (torch.float16, Precision.SIXTEEN_BIT, own_attend("attend_hopper16"), Element.FP16),
    ):
        for head_dim, padded in ((40, 64), (64, 64), (96, 128), (128, 128)):
            q, k, v = make_qkv(1, 2, 200, head_dim, dtype=dtype, device="cuda")
            for pvthreshd, pv_filter in ((9.0, True), (50.0, False)):
                attention(q, k, v, SparsePolicy(precision=precision, pvthreshd=pvthreshd))
                assert launched[-1] == KernelSpec(entry, arch, padded, element, pv_filter)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [17776, 44776, 119056])
def test_extra_memory(tokens: int, head_dim: int) -> None:
    """It is at most 0.55 x (q + k + v) beyond the output."""
    shape, bf16 = (1, tokens, 4, head_dim), torch.bfloat16
    q, k, v = (torch.randn(shape, device="cuda", dtype=bf16).transpose(1, 2) for _ in "qkv")
    attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], HALF)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention(q, k, v, HALF, out_layout="NHD")
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    assert extra <= 0.55 * 3 * q.numel() * q.element_size()


@pytest.mark.parametrize("ordered", [False, True])
def test_head_groups_give_the_same_bits(ordered: bool, make_qkv, monkeypatch, launched) -> None:
    grid = TokenGrid(5, 10, 10)
    q, k, v = make_qkv(2, 6, grid.tokens, 64, kv_heads=3, device="cuda")
    order_kind = torch.tensor([0, 0, 1, 1, 7, 7], dtype=torch.int32, device="cuda")
    settings = replace(settings_of(6, scaled=True), order_kind=order_kind if ordered else None)

    def attend(kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        monkeypatch.setattr(prepared, "_heads_at_once", lambda *_: kv_heads)
        prepared._kept.clear()
        launched.clear()
        stats = AttentionStats("cuda")
        order = grid_order(grid) if ordered else None
        named = {"order": order, "head_settings": settings, "stats": stats}
        return (*attention(q, k, v, HALF, return_lse=True, **named), stats.counters)

    whole = attend(3)
    assert len(launched) == 4
    grouped = attend(1)
    assert len(launched) == 3 * 4, "one group for each KV head"
    assert all(map(torch.equal, whole, grouped))


@pytest.mark.parametrize("policy", [HALF, SparsePolicy(topk=1.0)], ids=["sparse", "dense"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_other_tensors_of_a_kind_give_the_bits_of_a_call_prepared_anew(
    policy: SparsePolicy, layout: str, head_dim: int
) -> None:
    """Views of one tensor, as of a linear layer for all three, and q at an address that takes no
    vector loads; at last q is k and v."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, policy, layout=layout)

    held = []
    with torch.no_grad():
        for _ in range(4):
            packed = torch.randn(2, 700, 3, 4, head_dim, device="cuda").bfloat16()
            q, k, v = (x if layout == "NHD" else x.transpose(1, 2) for x in packed.unbind(2))
            odd = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape)
            for tensors in ((q, k, v), (odd.copy_(q), k, v), (k, k, k)):
                held.append((tensors, call(*tensors)))
            assert len(prepared._kept) <= 3
        for tensors, out in held:
            prepared._kept.clear()
            assert torch.equal(call(*tensors), out)


def test_current_stream(qkv: Operands) -> None:
    """Work is queued behind what the current stream is still computing."""
    q, k, v = qkv
    truth = attention(q, k, v, HALF)
    late = torch.zeros_like(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = attention(late, k, v, HALF)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, truth)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("aside", [False, True], ids=["default stream", "side stream"])
def test_another_gpu_than_the_current_one(aside: bool, make_qkv) -> None:
    """Also in a thread that has used no GPU yet."""
    qkv = make_qkv(1, 4, GRID.tokens, 128, device="cuda:1")
    order, settings = grid_order(GRID), HeadSettings.uniform(4, 0.5, 1.0, device="cuda:1")

    def call() -> Tensor:
        return attention(*qkv, SparsePolicy(), order=order, head_settings=settings)

    with torch.cuda.device(1):
        expected = call()
        stream = torch.cuda.Stream() if aside else torch.cuda.default_stream()
        torch.cuda.synchronize()
    assert torch.cuda.current_device() == 0

    def of_thread() -> Tensor:
        before = torch.cuda.current_stream(1)
        torch.cuda.set_stream(stream)
        torch.cuda.set_device(0)
        try:
            return call()
        finally:
            torch.cuda.set_stream(before)
            torch.cuda.set_device(0)

    with ThreadPoolExecutor(1) as pool:
        outs = [of_thread(), pool.submit(of_thread).result()]
    torch.cuda.synchronize(1)
    assert all(torch.equal(out, expected) for out in outs)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("policy", [HALF, SparsePolicy(topk=1.0)], ids=["sparse", "dense"])
def test_a_stream_of_its_own_and_a_graph(policy: SparsePolicy, qkv: Operands) -> None:
    def call() -> Tensor:
        return attention(*qkv, policy)

    expected = call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = call()
    stream.synchronize()
    assert torch.equal(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    qkv[0].copy_(qkv[0].flip(2))
    graph.replay()
    assert torch.equal(found, call())


def test_cuda_graph_keeps_its_table_and_its_order(qkv: Operands) -> None:
    """However many others come after the recording."""
    settings, order = HeadSettings.uniform(4, 0.5, device="cuda"), grid_order(GRID)

    def call() -> Tensor:
        return attention(*qkv, SparsePolicy(), order=order, head_settings=settings)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    others = [grid_order(replace(GRID, width=20 + n)) for n in range(48)]
    for other in others:
        other.on("cuda:0")
    for index in range(64):
        settings.table(SparsePolicy(pvthreshd=10.0 + index))
    torch.cuda.empty_cache()
    filled = [torch.full((1 << 20,), -1, dtype=torch.int32, device="cuda") for _ in range(64)]
    qkv[0].copy_(qkv[0].flip(2))
    graph.replay()
    assert torch.equal(out, call())
    del filled


def test_deterministic_mode_changes_no_bit(qkv: Operands) -> None:
    """It fills what is allocated, and refuses some of torch's own operations."""
    order, settings = grid_order(GRID), HeadSettings.uniform(4, 0.5, 1.0, Router.ERROR, "cuda")

    def results() -> list[Tensor]:
        out, lse = attention(
            *qkv, SparsePolicy(), order=order, head_settings=settings, return_lse=True
        )
        return [out, lse, measure(measured_call(qkv, order, range(4))).error]

    expected = results()
    torch.use_deterministic_algorithms(True)
    try:
        found = results()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, found, expected))


def test_torch_compile_without_a_break(qkv: Operands) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, HALF, out_layout="NHD").flatten(2) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*qkv), layer(*qkv))


def test_the_op_passes_opcheck(make_qkv) -> None:
    q, k, v = make_qkv(1, 4, 300, 128, device="cuda")
    counters = torch.zeros(len(Counter), dtype=torch.int64, device="cuda")
    rules = f"({HALF.facts}, None, None, False, False, 'NHD', 'torch.bfloat16', True)"
    given = (q, k, v, [None] * 8, None, counters, rules, [0, 0], 0.09)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(op.attention.default, given, test_utils=checks)


def test_offsets_beyond_two_to_the_31(make_qkv) -> None:
    """A head that starts 2^31 elements into the tensor, and tokens that lie 2^31 elements apart."""
    tokens, head_dim = 300, 64
    memory = torch.empty(2**31 + 2 * tokens * head_dim, dtype=torch.bfloat16, device="cuda")
    qkv = make_qkv(1, 2, tokens, head_dim, device="cuda")
    truth = attention(*qkv, HALF)
    far = memory.as_strided((1, 2, tokens, head_dim), (0, 2**31, head_dim, 1))
    for place in range(3):
        inputs = list(qkv)
        inputs[place] = far.copy_(qkv[place])
        assert torch.equal(attention(*inputs, HALF), truth)
    step = 2**31 // tokens // 8 * 8
    q, k, v = (x[:, :1] for x in qkv)
    apart = memory.as_strided(k.shape, (0, 0, step, 1)).copy_(k)
    assert torch.equal(attention(q, apart, v, HALF), attention(q, k, v, HALF))


@pytest.mark.parametrize("tokens", [17776, 119056])
def test_long_sequences(tokens: int, make_qkv) -> None:
    """A few query blocks of a long sequence against float32 over exactly their blocks.

    P and V each lose up to 2^-4 in E4M3 (an H200 reached 0.040) and 2^-11 in FP16; INT8 scores
    lose 0.02.
    """
    q, k, v = make_qkv(1, 1, tokens, 64, device="cuda")
    policy = SparsePolicy(topk=0.05)
    kept = kept_blocks(q, k, policy)
    out = attention(q, k, v, policy)
    assert torch.isfinite(out).all()
    assert (kept.sum(-1) == max(1, int(0.05 * kept.shape[-1]))).all()
    for block in (0, kept.shape[2] // 2, kept.shape[2] - 1):
        rows = slice(block * QUERY_BLOCK, min((block + 1) * QUERY_BLOCK, tokens))
        keys = kept[0, 0, block].repeat_interleave(KEY_BLOCK)[:tokens]
        read = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        exact = scaled_dot_product_attention(*(x.float() for x in read))
        assert rel_l2(out[:, :, rows], exact) < (0.06 if e4m3() else 0.03)
