# SPDX-License-Identifier: Apache-2.0
"""Arguments that callers may pass, by the kernels: long text, mixed dtypes, padding masks,
autocast."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge import AttentionStats, BlockPlan, HeadSettings, Precision, SparsePolicy, key_padding
from sparge.common.metrics import rel_l2
from sparge.kernels import KernelSpec

pytestmark = pytest.mark.gpu

attention: Any = sparge.attention
DENSE = SparsePolicy(topk=1.0)
EXACT = SparsePolicy(topk=1.0, precision=Precision.SIXTEEN_BIT)


@pytest.mark.parametrize("name", ["exact_prefix", "exact_suffix"])
@pytest.mark.parametrize("tokens", [2**31, 2**32 + 5])
def test_text_longer_than_the_sequence_is_all_of_it(make_qkv, name: str, tokens: int) -> None:
    q, k, v = make_qkv(1, 2, 1000, 128, device="cuda")
    policy = replace(SparsePolicy(topk=0.1), **{name: tokens})
    stats = AttentionStats("cuda")
    assert torch.equal(attention(q, k, v, policy, stats=stats), attention(q, k, v, DENSE))
    assert stats.density == 1


@pytest.mark.parametrize("large", ["q", "k", "v"])
def test_bf16_products_where_not_all_are_fp16(
    make_qkv, large: str, launched: list[KernelSpec]
) -> None:
    given = dict(
        zip("qkv", make_qkv(1, 2, 700, 128, dtype=torch.float16, device="cuda"), strict=True)
    )
    given[large] = given[large].bfloat16() * 1e6
    if large != "v":
        other = "k" if large == "q" else "q"
        given[other] = given[other] * 1e-5
    out = attention(*given.values(), EXACT, output_dtype=torch.float32)
    truth = scaled_dot_product_attention(*(x.double() for x in given.values()))
    assert rel_l2(out, truth) < 0.02
    assert {spec.element.name for spec in launched if spec.reads_element} == {"BF16"}


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


@pytest.mark.parametrize("kind", ["behind", "text first"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_padding_mask_waits_once(make_qkv, kind: str, inference: bool) -> None:
    q, k, v = make_qkv(2, 4, 900, 64, kv_heads=2, device="cuda")
    places = torch.arange(900, device="cuda")
    with torch.inference_mode(inference):
        real = torch.stack([(places < 60) | (places > 200), places < 800])
        if kind == "behind":
            real = torch.stack([places < 60, places < 800])
        mask = real[:, None, None]
        assert [waits_of(mask), waits_of(mask)] == [1, 0]
        keys, values, lengths = key_padding(mask).apply(k, v)
        out = attention(q, keys, values, EXACT, key_lengths=lengths)
        truth = scaled_dot_product_attention(
            q.float(), k.float(), v.float(), attn_mask=mask, enable_gqa=True
        )
    assert rel_l2(out, truth) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(make_qkv, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(1, 2, 700, 64, device="cuda", dtype=torch.float32)
    head_settings = HeadSettings.uniform(2, 0.3, 0.5, device="cuda")
    options: list[dict[str, Any]] = [{}, {"head_settings": head_settings}]
    for named in options:
        expected = attention(q, k, v, **named)
        with torch.autocast("cuda", dtype):
            assert torch.equal(attention(q, k, v, **named), expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_without_a_pair_do_not_count(make_qkv, is_causal: bool) -> None:
    q, k, v = make_qkv(1, 2, 500, 64, device="cuda")
    lengths = torch.tensor([100], dtype=torch.int32, device="cuda")
    ones = torch.ones(1, 2, 4, 8, dtype=torch.bool, device="cuda")
    plan = BlockPlan.from_kept(ones, 500, 500, is_causal, lengths)
    bits = torch.full((1, 2, 4, 1), -1, dtype=torch.int32, device="cuda")
    stray = BlockPlan(bits, plan.counts, 500, 500, is_causal, lengths)
    of_plan, of_stray, of_topk = (AttentionStats("cuda") for _ in range(3))
    named: dict[str, Any] = {"is_causal": is_causal, "key_lengths": lengths}
    expected = attention(q, k, v, DENSE, stats=of_topk, **named)
    assert torch.equal(attention(q, k, v, DENSE, plan=plan, stats=of_plan), expected)
    assert torch.equal(attention(q, k, v, DENSE, plan=stray, stats=of_stray), expected)
    assert of_plan.blocks_kept == of_stray.blocks_kept == of_topk.blocks_kept == 2 * 4 * 2


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
