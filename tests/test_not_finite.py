# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity: where dense attention gives no number, sparse attention gives none either."""

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

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 64
GRID = TokenGrid(5, 16, 16, suffix=30)
TOKENS = GRID.tokens
#: Batch entry, head of keys, token and channel that the bad number gets. Its key block is one that
#: most query blocks drop, and not in the runs of keys of which an order takes its mean key.
PLACE = (1, 1, 700, 5)
GROUP = HEADS // KV_HEADS
BAD = {"nan": math.nan, "inf": math.inf, "minus inf": -math.inf}
POLICY = {"topk", "smooth_k", "pvthreshd"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


#: Ways in which a call chooses its blocks.
WAYS: dict[str, dict[str, Any]] = {
    "dense": {"topk": 1.0},
    "sparse": {},
    "unsmoothed": {"smooth_k": False},
    "filtered": {"pvthreshd": 20.0},
    "causal": {"topk": 0.3, "is_causal": True},
    "ordered": {"order": True},
    "budget": {"order": True, "head_settings": True},
    "block mask": {"block_mask": True},
    "plan": {"plan": True},
}


def attend(way: str, precision: Precision, device: str, *qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    q, k, v = (x.to(device) for x in qkv)
    options: dict[str, Any] = {"topk": 0.15} | WAYS[way]
    of_policy = {name: options.pop(name) for name in POLICY & options.keys()}
    policy = SparsePolicy(precision=precision, **of_policy)
    if "order" in options:
        options["order"] = grid_order(GRID).on(device)
    if "head_settings" in options:
        head_settings = HeadSettings.uniform(HEADS, 0.15, 1.0, Router.ERROR, torch.device(device))
        if precision is not Precision.SIXTEEN_BIT:
            half = torch.full((HEADS,), 0.5, device=device)
            head_settings = replace(head_settings, output_scale=half)
        options["head_settings"] = head_settings
    if "block_mask" in options:
        options["block_mask"] = _mask_without_the_place(device)
    if "plan" in options:
        mask = _mask_without_the_place(device)
        options["plan"] = make_plan(q, k, policy, block_mask=mask)
    out, lse = attention(q, k, v, policy, return_lse=True, **options)
    return out.cpu(), lse.cpu()


def _mask_without_the_place(device: str) -> Tensor:
    query_blocks, key_blocks = -(-TOKENS // QUERY_BLOCK), -(-TOKENS // KEY_BLOCK)
    mask = torch.ones(BATCH, HEADS, query_blocks, key_blocks, dtype=torch.bool, device=device)
    mask[..., PLACE[2] // KEY_BLOCK] = False
    return mask


@pytest.fixture
def clean(make_qkv) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(BATCH, HEADS, TOKENS, HEAD_DIM, kv_heads=KV_HEADS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_key_or_value_makes_its_whole_head_nan(which, way, bad, precision, device, clean) -> None:
    q, k, v = clean
    out, _ = attend(way, precision, device, q, k, v)
    k, v = k.clone(), v.clone()
    (k if which == "k" else v)[PLACE] = BAD[bad]
    hurt, lse = attend(way, precision, device, q, k, v)

    own = torch.zeros(BATCH, HEADS, dtype=torch.bool)
    own[PLACE[0], PLACE[1] * GROUP : (PLACE[1] + 1) * GROUP] = True
    rows = hurt.isfinite().all(-1)
    assert not rows[own].any()
    assert lse[own].isnan().all()
    assert torch.equal(hurt[~own], out[~own])
    assert lse[~own].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("way", WAYS)
def test_a_query_makes_its_row_nan(way, bad, precision, device, clean) -> None:
    q, k, v = clean
    out, _ = attend(way, precision, device, q, k, v)
    q = q.clone()
    q[PLACE] = BAD[bad]
    hurt, lse = attend(way, precision, device, q, k, v)

    own = torch.zeros(BATCH, HEADS, TOKENS, dtype=torch.bool)
    own[PLACE[:3]] = True
    assert hurt[own].isnan().any(-1).all()
    assert lse[own].isnan().all()
    assert hurt[~own].isfinite().all()
    assert lse[~own].isfinite().all()
    others = torch.ones(BATCH, HEADS, dtype=torch.bool)
    others[PLACE[:2]] = False
    assert torch.equal(hurt[others], out[others])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", Precision)
def test_partial_results_are_nan(precision, device, clean) -> None:
    q, k, v = (x.to(device, copy=True) for x in clean)
    k[PLACE] = math.nan
    policy = SparsePolicy(topk=0.15, precision=precision)
    parts = attention_partials(q, k, v, policy)
    own = slice(PLACE[1] * GROUP, (PLACE[1] + 1) * GROUP)
    assert parts.row_sum[PLACE[0], own].isnan().all()
    assert parts.out_sum[PLACE[0], own].isnan().all()
    assert parts.row_sum[1 - PLACE[0]].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", Precision)
def test_what_lies_behind_the_key_lengths_does_not_count(precision, device, clean) -> None:
    q, k, v = clean
    lengths = torch.tensor([TOKENS, PLACE[2]], dtype=torch.int32, device=device)
    policy = SparsePolicy(topk=0.15, precision=precision)

    def cut(k: Tensor, v: Tensor) -> Any:
        return attention(q.to(device), k.to(device), v.to(device), policy, key_lengths=lengths)

    out = cut(k, v)
    k, v = k.clone(), v.clone()
    k[1, :, PLACE[2] :] = math.nan
    v[1, :, PLACE[2] :] = math.inf
    assert torch.equal(cut(k, v), out)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", Precision)
def test_key_lengths_that_cut_the_grid_of_an_order_give_nan(precision, clean) -> None:
    """The host cannot see it without waiting; on a CPU it raises."""
    lengths = torch.tensor([TOKENS, 150], dtype=torch.int32, device="cuda")
    policy = SparsePolicy(topk=0.5, precision=precision)
    order = grid_order(GRID).on("cuda")
    q, k, v = (x.cuda() for x in clean)
    out = attention(q, k, v, policy, order=order, key_lengths=lengths)
    assert out[0].isfinite().all()
    assert out[1].isnan().any(-1).all()
