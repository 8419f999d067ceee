# SPDX-License-Identifier: Apache-2.0
"""Calls by the kernels beside float64, the CPU and each other: magnitudes, alignments of a causal
mask, all ways to keep everything, rules of a caller, padding masks, autocast, many queries."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from benchmarks.metrics import rel_l2
from sparge import AttentionStats, HeadSettings, Precision, SparsePolicy, TorchCall, key_padding
from tests.gpu.conftest import Kernels, every_kernel, no_waits
from tests.test_attention import judge_rows_beside_a_nan
from tests.test_causal import assert_same_rows, dense, visible
from tests.test_rules import GRID, RULES, of_elements

pytestmark = pytest.mark.gpu

attention: Any = sparge.attention
DENSE = SparsePolicy(topk=1.0)
EXACT = SparsePolicy(topk=1.0, precision=Precision.SIXTEEN_BIT)

#: Factors of q, k and v, tokens, head_dim and whether the call is causal.
FACTORS = (
    *((x, x, 1.0, 640, d, False) for x in (30.0, 700.0, 13000.0, 1e8) for d in (64, 128)),
    *((x, x, 1.0, 300, 64, causal) for x in (0.0, 1e-3, 1e-21, 1e-38) for causal in (False, True)),
    *((x, 1 / x, 1.0, 300, 128, False) for x in (1e-18, 1e-6, 1e6, 1e18)),
    *((1.0, 1.0, x, 1000, 64, False) for x in (1e-37, 1e-30, 1e-10, 1e10, 1e30)),
)


@every_kernel
@pytest.mark.parametrize(("of_q", "of_k", "of_v", "tokens", "head_dim", "is_causal"), FACTORS)
def test_logits_of_any_size_are_as_float64_says(
    of_q, of_k, of_v, tokens, head_dim, is_causal, kernels: Kernels, force, make_qkv
) -> None:
    """Where logits are large a row gets its own value, where they are tiny the mean of all."""
    force(kernels)
    q, k, v = make_qkv(1, 2, tokens, head_dim, dtype=torch.float32, device="cuda")
    if of_q == of_k:
        k = q
    q, k, v = (q * of_q).bfloat16(), (k * of_k).bfloat16(), ((v + 1) * of_v).bfloat16()
    if of_q < 1 and of_q == of_k:
        q[:, :, 100:164] = 0  # a query block's half and a key block of zeros beside tiny ones
        k = q
    scale = 1e-3 if of_q == 0 else head_dim**-0.5  # times the infinity of a masked key: no NaN
    options = {"is_causal": is_causal, "scale": scale, "output_dtype": torch.float32}
    out, lse = attention(q, k, v, DENSE, return_lse=True, **options)
    truth = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=is_causal)
    assert rel_l2(out.double() / of_v, truth / of_v) < 0.05
    if of_q == of_k >= 30:
        own = q.double().square().sum(-1) * scale
        torch.testing.assert_close(lse.double(), own, rtol=0.02, atol=1.0)


@every_kernel
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("return_lse", [False, True])
def test_rows_that_see_no_key_are_0_beside_a_nan(
    return_lse: bool, head_dim: int, kernels: Kernels, force, make_qkv
) -> None:
    """With 8 bits causal rows may be NaN that see no key of the blocks they keep."""
    force(kernels)
    qkv = make_qkv(1, 2, 300, head_dim, device="cuda")
    judge_rows_beside_a_nan(qkv, return_lse, is_causal=not kernels.element.quantized)


@pytest.mark.parametrize("causal", ["top-left", "bottom-right"])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(
    ("queries", "keys", "head_dim"),
    [(1, 4000, 128), (1, 65, 64), (130, 2049, 96), (1024, 1536, 64), (700, 300, 128), (300, 1, 40)],
)
def test_sees_what_the_alignment_says(
    make_qkv, poison, causal: str, precision: Precision, queries: int, keys: int, head_dim: int
) -> None:
    q, k, v = make_qkv(2, 4, queries, head_dim, kv_heads=2, kv_tokens=keys, device="cuda")
    truth, truth_lse = dense(q, k, v, visible(queries, keys, causal).cuda())
    policy, stats = replace(DENSE, precision=precision), AttentionStats("cuda")
    out, lse = attention(q, k, v, policy, causal=causal, return_lse=True, stats=stats)
    # Noise attended to by noise, where no error averages out: as in test_long_sequences.
    assert rel_l2(out, truth) < (0.01 if precision is Precision.SIXTEEN_BIT else 0.06)
    assert_same_rows(lse, truth_lse, 0.1)
    assert (stats.sparse_calls, stats.density) == (1, 1.0)


@pytest.mark.parametrize("pool_weight", [None, 0.5])
@pytest.mark.parametrize(("queries", "keys"), [(256, 2240), (2240, 256)])
def test_sparse_calls_of_another_alignment_are_those_of_the_reference(
    make_qkv, pool_weight: float | None, queries: int, keys: int
) -> None:
    qkv = make_qkv(1, 4, queries, 64, kv_tokens=keys)
    policy = SparsePolicy(topk=0.3, precision=Precision.INT8_FP16, attention_sink=True)

    def run(device: str) -> tuple[Tensor, Tensor, list[int]]:
        stats, settings = AttentionStats(device), None
        if pool_weight is not None:
            settings = HeadSettings.uniform(4, 0.3, pool_weight, device=device)
        options = {"causal": "bottom-right", "head_settings": settings, "stats": stats}
        given = (x.to(device) for x in qkv)
        out, lse = attention(*given, policy, return_lse=True, **options)
        return out.cpu(), lse.cpu(), stats.counters.tolist()

    (out, lse, counters), (truth, truth_lse, truth_counters) = run("cuda"), run("cpu")
    assert counters == truth_counters
    assert rel_l2(out, truth) < 0.03  # as test_long_sequences without E4M3
    assert_same_rows(lse, truth_lse, 0.05)


def test_both_parts_of_a_causal_call_wait_for_nothing_and_may_be_exact(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 128, 64, kv_tokens=900, device="cuda")
    expected = attention(q, k, v, DENSE, causal="bottom-right")
    policy = SparsePolicy(topk=0.5, exact_prefix=2**31 - 1)
    attention(q, k, v, policy, causal="bottom-right")
    with no_waits():
        out = attention(q, k, v, policy, causal="bottom-right")
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "lengths", [None, (1100, 700), (100, 100)], ids=["full", "ragged", "short"]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_all_blocks_are_kept_alike_by_a_share_and_a_mask(
    is_causal: bool, lengths, make_qkv
) -> None:
    """Blocks without a pair that a mask keeps do not count."""
    q, k, v = make_qkv(2, 4, 1100, 128, kv_heads=2, device="cuda")  # 9 by 18 blocks, ragged
    if lengths is not None:
        lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    ones = torch.ones(2, 4, 9, 18, dtype=torch.bool, device="cuda")

    def run(block_mask: Tensor | None) -> tuple[Tensor, ...]:
        stats = AttentionStats("cuda")
        named = {"is_causal": is_causal, "key_lengths": lengths, "block_mask": block_mask}
        result = attention(q, k, v, DENSE, return_lse=True, stats=stats, **named)
        assert stats.density == 1
        return (*result, stats.counters)

    assert all(map(torch.equal, run(ones), run(None)))


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.SIXTEEN_BIT])
@pytest.mark.parametrize("name", RULES)
def test_rules_of_a_caller(make_qkv, name: str, precision: Precision) -> None:
    """Nothing waits, and CUDA graphs take them."""
    q, k, v = make_qkv(2, 4, GRID.tokens, 64, kv_heads=2, device="cuda")
    rule, policy = RULES[name]("cuda"), SparsePolicy(precision=precision)
    found, stats = rule(TorchCall(q, k, v)), AttentionStats("cuda")
    pairs = of_elements(found["order"], found["block_mask"])
    out = attention(q, k, v, policy, stats=stats, **found)
    assert rel_l2(out, dense(q, k, v, pairs)[0]) < (0.01 if precision is EXACT.precision else 0.06)
    assert stats.density == pytest.approx(float(pairs.double().mean())) and stats.density < 0.8
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = attention(q, k, v, policy, **rule(TorchCall(q, k, v)))
    graph.replay()
    with no_waits():
        again = attention(q, k, v, policy, **rule(TorchCall(q, k, v)))
    assert torch.equal(again, out) and torch.equal(recorded, out)


def waits_of(mask: Tensor) -> int:
    """Synchronisations that one call costs."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            key_padding(mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught)


@pytest.mark.parametrize("inference", [False, True])
def test_a_padding_mask_waits_while_its_changes_do_not_show(make_qkv, inference: bool) -> None:
    q, k, v = make_qkv(2, 4, 900, 64, kv_heads=2, device="cuda")
    places = torch.arange(900, device="cuda")
    with torch.inference_mode(inference):
        # Padding between a text and the rest, and behind all.
        mask = torch.stack([(places < 60) | (places > 200), places < 800])[:, None, None]
        assert [waits_of(mask), waits_of(mask)] == [1, int(inference)]
        keys, values, lengths = key_padding(mask).apply(k, v)
        out = attention(q, keys, values, EXACT, key_lengths=lengths)
        truth = scaled_dot_product_attention(
            q.float(), k.float(), v.float(), attn_mask=mask, enable_gqa=True
        )
    assert rel_l2(out, truth) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(make_qkv, dtype: torch.dtype) -> None:
    qkv = make_qkv(1, 2, 700, 64, device="cuda", dtype=torch.float32)
    for head_settings in (None, HeadSettings.uniform(2, 0.3, 0.5, device="cuda")):
        expected = attention(*qkv, head_settings=head_settings)
        with torch.autocast("cuda", dtype):
            assert torch.equal(attention(*qkv, head_settings=head_settings), expected)


def test_many_queries_of_one_key_head(generator: torch.Generator) -> None:
    """There are more runs of query blocks than a grid's second axis has places."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free memory")
    q = torch.zeros(1, 64, 540_000, 64, dtype=torch.bfloat16, device="cuda")
    rows = [0, 127, 128, 270_001, 539_999]
    some = torch.randn(1, 64, len(rows), 64, generator=generator).to("cuda", torch.bfloat16)
    q[:, :, rows] = some
    k, v = torch.randn(2, 1, 1, 300, 64, generator=generator).to("cuda", torch.bfloat16)
    # Whose blocks nothing drops, though Q is averaged to see that.
    policy = SparsePolicy(topk=0.5, simthreshd1=2.0, precision=Precision.SIXTEEN_BIT)
    out = attention(q, k, v, policy)[:, :, rows]
    truth = scaled_dot_product_attention(some.float(), k.float(), v.float(), enable_gqa=True)
    assert rel_l2(out, truth) < 0.01
