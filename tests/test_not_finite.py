# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity: where dense attention gives no number, sparse attention gives none either."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge import (
    HeadBudget,
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
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Way:
    """Way in which a call chooses its blocks."""

    topk: float = 0.15
    causal: bool = False
    ordered: bool = False
    budget: bool = False
    masked: bool = False
    planned: bool = False
    smooth_k: bool = True
    filtered: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, precision: Precision):
        """Output and log-sum-exp."""
        pvthreshd = 20.0 if self.filtered else 50.0
        policy = SparsePolicy(
            topk=self.topk, precision=precision, smooth_k=self.smooth_k, pvthreshd=pvthreshd
        )
        options: dict[str, Any] = {"is_causal": self.causal, "return_lse": True}
        if self.ordered:
            options["order"] = grid_order(GRID).on(q.device)
        if self.budget:
            budget = HeadBudget.uniform(HEADS, self.topk, 1.0, Router.ERROR, q.device)
            if precision is not Precision.SIXTEEN_BIT:
                half = torch.full((HEADS,), 0.5, device=q.device)
                budget = replace(budget, contrast=half)
            options["budget"] = budget
        if self.masked:
            options["block_mask"] = _mask_without_the_place(q.device)
        if self.planned:
            mask = _mask_without_the_place(q.device)
            options["plan"] = make_plan(q, k, policy, block_mask=mask)
        return attention(q, k, v, policy, **options)


WAYS = {
    "dense": Way(topk=1.0),
    "sparse": Way(),
    "unsmoothed": Way(smooth_k=False),
    "filtered": Way(filtered=True),
    "causal": Way(topk=0.3, causal=True),
    "ordered": Way(ordered=True),
    "budget": Way(ordered=True, budget=True),
    "block mask": Way(masked=True),
    "plan": Way(planned=True),
}


def _mask_without_the_place(device: torch.device) -> Tensor:
    query_blocks, key_blocks = -(-TOKENS // QUERY_BLOCK), -(-TOKENS // KEY_BLOCK)
    mask = torch.ones(BATCH, HEADS, query_blocks, key_blocks, dtype=torch.bool, device=device)
    mask[..., PLACE[2] // KEY_BLOCK] = False
    return mask


@pytest.fixture
def clean(make_qkv, request: pytest.FixtureRequest) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(BATCH, HEADS, TOKENS, HEAD_DIM, kv_heads=KV_HEADS)


def _attend(way: Way, precision: Precision, device: str, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(device) for x in tensors)
    out, lse = way.attend(q, k, v, precision)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_key_or_value_makes_its_whole_head_nan(which, way, bad, precision, device, clean) -> None:
    q, k, v = clean
    out, _ = _attend(WAYS[way], precision, device, q, k, v)
    k, v = k.clone(), v.clone()
    (k if which == "k" else v)[PLACE] = BAD[bad]
    hurt, lse = _attend(WAYS[way], precision, device, q, k, v)

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
    out, _ = _attend(WAYS[way], precision, device, q, k, v)
    q = q.clone()
    q[PLACE] = BAD[bad]
    hurt, lse = _attend(WAYS[way], precision, device, q, k, v)

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

    def attend(k: Tensor, v: Tensor) -> Tensor:
        out = attention(q.to(device), k.to(device), v.to(device), policy, key_lengths=lengths)
        assert isinstance(out, Tensor)
        return out

    out = attend(k, v)
    k, v = k.clone(), v.clone()
    k[1, :, PLACE[2] :] = math.nan
    v[1, :, PLACE[2] :] = math.inf
    assert torch.equal(attend(k, v), out)


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
