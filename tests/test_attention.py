# SPDX-License-Identifier: Apache-2.0
"""The public call on a machine without a usable GPU; tests/fuzz judges its numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from sparge import HeadSettings, Precision, Router, SparsePolicy, TokenGrid

attention: Any = sparge.attention  # a tensor, or a pair with return_lse
DENSE = SparsePolicy(topk=1.0)
SPARSE = SparsePolicy(topk=0.4)
SIXTEEN_BIT = SparsePolicy(topk=1.0, precision=Precision.SIXTEEN_BIT)


def test_the_result_lies_packed_in_the_layout_that_was_asked_for(make_qkv) -> None:
    q, k, v = make_qkv(2, 3, 200, 64, kv_tokens=330)
    expected = attention(q, k, v, SPARSE)
    for layout, out_layout in product(("HND", "NHD"), (None, "HND", "NHD")):
        given = [x if layout == "HND" else x.transpose(1, 2).contiguous() for x in (q, k, v)]
        out = attention(*given, SPARSE, layout=layout, out_layout=out_layout)
        assert out.is_contiguous()
        heads_first = (out_layout or layout) == "HND"
        assert torch.equal(out if heads_first else out.transpose(1, 2), expected)


def test_head_settings_that_do_not_pool_drop_whatever_the_pool_weight(make_qkv) -> None:
    """Kernels do the same, for which nothing is prepared then."""
    q, k, v = make_qkv(1, 2, 700, 64)
    plain, ones = HeadSettings.uniform(2, 0.3), torch.ones(2)
    expected = attention(q, k, v, head_settings=plain)
    for pools in (True, False):
        router = ones.int() * Router.ERROR
        settings = replace(plain, pool_weight=ones, router=router, pools=pools)
        assert torch.equal(attention(q, k, v, head_settings=settings), expected) != pools


def test_stats_add_up_over_calls(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 640, 64)
    stats = sparge.AttentionStats("cpu")
    assert (stats.density, stats.sparse_calls, stats.blocks_kept) == (1.0, 0, 0)
    attention(q, k, v, SparsePolicy(topk=0.2), stats=stats)
    assert stats.density == pytest.approx(0.2)
    assert stats.blocks_kept == 2 * 5 * 2  # of 2 heads and 5 query blocks, 2 of 10
    attention(q, k, v, DENSE, stats=stats)
    assert stats.density == pytest.approx(0.6) and stats.blocks_kept == 2 * 5 * (2 + 10)
    assert (stats.sparse_calls, stats.pv_skipped_share) == (2, 0)
    stats.reset()
    assert (stats.density, stats.sparse_calls) == (1.0, 0)
    q, k[:, :, :64] = q + 1, k[:, :, :64] + 2
    attention(q, k, v, SparsePolicy(topk=1.0, pvthreshd=2.0), stats=stats)
    assert 0.5 < stats.pv_skipped_share <= 0.9


def judge_rows_beside_a_nan(qkv: tuple[Tensor, ...], return_lse: bool, is_causal: bool) -> None:
    """A NaN in a key of one of two heads of 300 tokens, and a mask that leaves the second query
    block no key, the third one not that key, and causal rows of the first one a block of which they
    see no key."""
    q, k, v = qkv
    k[:, 0, 70, 3] = torch.nan
    mask = torch.ones(1, 2, 3, 5, dtype=torch.bool, device=q.device)
    mask[:, :, 1], mask[:, :, 2, 1] = False, False
    mask[:, :, 0, 0] = not is_causal
    options = {"block_mask": mask, "is_causal": is_causal}
    result = attention(q, k, v, SIXTEEN_BIT, return_lse=return_lse, **options)
    sees = torch.ones(300, dtype=torch.bool, device=q.device)
    sees[128:256] = False
    if is_causal:
        sees[:64] = False
    for found, of_none in zip(result if return_lse else (result,), (0, -torch.inf), strict=False):
        assert (found[:, :, ~sees] == of_none).all()
        assert found[:, 0, sees].isnan().all() and found[:, 1, sees].isfinite().all()


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_that_see_no_key_are_0_beside_a_nan(make_qkv, return_lse, is_causal) -> None:
    judge_rows_beside_a_nan(make_qkv(1, 2, 300, 64), return_lse, is_causal)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", Precision)
def test_key_lengths_that_cut_the_grid_of_an_order_give_nan(precision, make_qkv) -> None:
    """The host cannot see it without waiting; on a CPU it raises."""
    grid = TokenGrid(4, 9, 14, suffix=30)
    lengths = torch.tensor([grid.tokens, 150], dtype=torch.int32, device="cuda")
    policy, order = SparsePolicy(topk=0.5, precision=precision), sparge.grid_order(grid).on("cuda")
    q, k, v = make_qkv(2, 4, grid.tokens, 64, kv_heads=2, device="cuda")
    out = attention(q, k, v, policy, order=order, key_lengths=lengths)
    assert out[0].isfinite().all() and out[1].isnan().any(-1).all()
