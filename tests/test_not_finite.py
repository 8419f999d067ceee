# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity: where dense attention gives no number, sparse attention gives none either, and
nothing of other heads and batch entries changes by a bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge import (
    HeadSettings,
    Precision,
    Router,
    SparsePolicy,
    TokenGrid,
    attention,
    attention_partials,
    grid_order,
    make_plan,
)
from sparge.blocks import KEY_BLOCK, QUERY_BLOCK

BATCH, HEADS, KV_HEADS = 2, 4, 2
GRID = TokenGrid(4, 9, 14, suffix=30)
TOKENS = GRID.tokens
#: Batch entry, head of keys, token and channel that the bad number gets. Its key block is one that
#: most query blocks drop.
PLACE = (1, 1, 250, 5)
OWN = (PLACE[0], slice(PLACE[1] * HEADS // KV_HEADS, (PLACE[1] + 1) * HEADS // KV_HEADS))
BAD = (math.nan, math.inf, -math.inf)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

#: Ways in which a call chooses its blocks: head_dim, options of the policy, and those of the call.
WAYS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "dense": (128, {"topk": 1.0}, ()),
    "sparse": (64, {}, ()),
    "unsmoothed": (40, {"smooth_k": False}, ()),
    "filtered": (64, {"pvthreshd": 20.0}, ()),
    "causal": (128, {"topk": 0.3}, ("is_causal",)),
    "ordered": (64, {}, ("order",)),
    "head settings": (64, {}, ("order", "head_settings")),
    "block mask": (8, {}, ("block_mask",)),
    "plan": (64, {}, ("plan",)),
    "lengths": (64, {}, ("key_lengths",)),
}


def attend(way: str, precision: Precision, device: str, *qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    q, k, v = (x.to(device) for x in qkv)
    _, of_policy, given = WAYS[way]
    scalars: dict[str, Any] = {"topk": 0.15} | of_policy
    policy = SparsePolicy(precision=precision, **scalars)
    head_settings = HeadSettings.uniform(HEADS, 0.15, 1.0, Router.ERROR, torch.device(device))
    if precision is not Precision.SIXTEEN_BIT:
        half = torch.full((HEADS,), 0.5, device=device)
        head_settings = replace(head_settings, output_scale=half)
    mask = torch.ones(BATCH, HEADS, -(-TOKENS // QUERY_BLOCK), -(-TOKENS // KEY_BLOCK))
    mask[..., PLACE[2] // KEY_BLOCK] = 0
    mask = mask.to(device)
    lengths = torch.tensor([TOKENS - 100, TOKENS - 60], dtype=torch.int32, device=device)
    makes: dict[str, Any] = {
        "is_causal": lambda: True,
        "order": lambda: grid_order(GRID).on(device),
        "head_settings": lambda: head_settings,
        "key_lengths": lambda: lengths,
        "block_mask": lambda: mask,
        "plan": lambda: make_plan(q, k, policy, block_mask=mask),
    }
    options: dict[str, Any] = {name: makes[name]() for name in given}
    out, lse = attention(q, k, v, policy, return_lse=True, **options)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_is_none_spoils_what_reads_it(
    way, precision, device, make_qkv, one_thread
) -> None:
    """One in K or V: all rows of the query heads that read it, whether their blocks are kept or
    not. One in Q: its row, and maybe others of its head."""
    qkv = make_qkv(BATCH, HEADS, TOKENS, WAYS[way][0], kv_heads=KV_HEADS)
    if way == "filtered":
        qkv = tuple(x.half() for x in qkv)
    out, clean_lse = attend(way, precision, device, *qkv)
    assert out.isfinite().all() and clean_lse.isfinite().all()
    for index, bad in [(1, BAD[0]), (2, BAD[1]), (1, BAD[2]), (0, BAD[0]), (0, BAD[1])]:
        given = [x.clone() for x in qkv]
        given[index][PLACE] = bad
        hurt, lse = attend(way, precision, device, *given)
        spoilt = torch.zeros(BATCH, HEADS, TOKENS, dtype=torch.bool)
        spoilt[PLACE[:3] if index == 0 else OWN] = True
        untouched = torch.ones(BATCH, HEADS, dtype=torch.bool)
        untouched[PLACE[:2] if index == 0 else OWN] = False
        assert not hurt.isfinite().all(-1)[spoilt].any(), (index, bad)
        assert lse[spoilt].isnan().all(), (index, bad)
        assert hurt[~spoilt].isfinite().all() and lse[~spoilt].isfinite().all(), (index, bad)
        for now, before in ((hurt, out), (lse, clean_lse)):
            assert torch.equal(now[untouched], before[untouched]), (index, bad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", Precision)
def test_partial_results_are_nan_and_keys_behind_the_length_do_not_count(
    precision, device, make_qkv, one_thread
) -> None:
    q, k, v = make_qkv(BATCH, HEADS, TOKENS, 64, kv_heads=KV_HEADS, device=device)
    lengths = torch.tensor([TOKENS, PLACE[2]], dtype=torch.int32, device=device)
    policy = SparsePolicy(topk=0.15, precision=precision)
    out: Any = attention(q, k, v, policy, key_lengths=lengths)
    behind_k, behind_v = k.clone(), v.clone()
    behind_k[1, :, PLACE[2] :], behind_v[1, :, PLACE[2] :] = math.nan, math.inf
    again: Any = attention(q, behind_k, behind_v, policy, key_lengths=lengths)
    assert torch.equal(again, out)
    k[PLACE] = math.nan
    parts = attention_partials(q, k, v, policy)
    assert parts.row_sum[OWN].isnan().all() and parts.out_sum[OWN].isnan().all()
    assert parts.row_sum[1 - PLACE[0]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", Precision)
def test_key_lengths_that_cut_the_grid_of_an_order_give_nan(precision, make_qkv) -> None:
    """The host cannot see it without waiting; on a CPU it raises."""
    lengths = torch.tensor([TOKENS, 150], dtype=torch.int32, device="cuda")
    policy = SparsePolicy(topk=0.5, precision=precision)
    q, k, v = make_qkv(BATCH, HEADS, TOKENS, 64, kv_heads=KV_HEADS, device="cuda")
    out: Any = attention(q, k, v, policy, order=grid_order(GRID).on("cuda"), key_lengths=lengths)
    assert out[0].isfinite().all() and out[1].isnan().any(-1).all()
