# SPDX-License-Identifier: Apache-2.0
"""Arguments that callers may pass, by the kernels: padding masks, autocast, stray blocks, many
queries."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge import AttentionStats, BlockPlan, HeadSettings, Precision, SparsePolicy, key_padding
from sparge.common.metrics import rel_l2

pytestmark = pytest.mark.gpu

attention: Any = sparge.attention
DENSE = SparsePolicy(topk=1.0)
EXACT = SparsePolicy(topk=1.0, precision=Precision.SIXTEEN_BIT)


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
def test_a_padding_mask_waits_once(make_qkv, inference: bool) -> None:
    q, k, v = make_qkv(2, 4, 900, 64, kv_heads=2, device="cuda")
    places = torch.arange(900, device="cuda")
    with torch.inference_mode(inference):
        # Padding behind the keys, and between a text and them.
        mask = torch.stack([(places < 60) | (places > 200), places < 800])[:, None, None]
        assert [waits_of(mask), waits_of(mask)] == [1, 0]
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


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_without_a_pair_do_not_count(make_qkv, is_causal: bool) -> None:
    qkv = make_qkv(1, 2, 500, 64, device="cuda")
    lengths = torch.tensor([100], dtype=torch.int32, device="cuda")
    ones = torch.ones(1, 2, 4, 8, dtype=torch.bool, device="cuda")
    plan = BlockPlan.from_kept(ones, 500, 500, is_causal, lengths)
    bits = torch.full((1, 2, 4, 1), -1, dtype=torch.int32, device="cuda")
    stray = BlockPlan(bits, plan.counts, 500, 500, is_causal, lengths)
    named: dict[str, Any] = {"is_causal": is_causal, "key_lengths": lengths}
    expected = attention(*qkv, DENSE, **named)
    for given in (None, plan, stray):
        stats = AttentionStats("cuda")
        assert torch.equal(attention(*qkv, DENSE, plan=given, stats=stats, **named), expected)
        assert stats.blocks_kept == 2 * 4 * 2


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
