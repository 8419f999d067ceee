# SPDX-License-Identifier: Apache-2.0
"""Stage route with head settings: which blocks are exact, which are pooled, in what rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import block_pairs, touches_diagonal, whole_steps
from ..head_settings import HeadSettings, Router
from ..policy import SparsePolicy
from .packed import Packed
from .route import (
    exact_query_blocks,
    kept_ranks,
    per_head,
    protected_keys,
    rank_blocks,
    valid_blocks,
)
from .scores import BlockFacts, log_mass, log_scores


@dataclass(frozen=True, eq=False)
class Choice:
    """Fate of each (query block, key block); all (B, H, nq, nk)."""

    kept: Tensor  # bool: computed exactly
    pooled: Tensor  # bool: stands in the softmax as one pseudo-key
    rank: Tensor  # int64: place among the ranked blocks, from 0; -1 for forced and invalid ones
    valid: Tensor  # bool: holds a pair
    pairs: Tensor  # int64: query-key pairs of each block, kept or not

    def kept_pairs(self) -> Tensor:
        """(B, H) int64: query-key pairs inside the kept blocks."""
        return (self.pairs * self.kept).sum((-2, -1))

    def valid_pairs(self) -> Tensor:
        """(B, H) int64: query-key pairs inside all blocks."""
        return self.pairs.sum((-2, -1))


def mass_scores(packed: Packed, scale: float) -> Tensor:
    """(B, H, nq, nk): `log_mass` of all blocks."""
    return log_mass(_facts(packed), scale)


def error_scores(packed: Packed, scale: float, valid: Tensor) -> Tensor:
    """(B, H, nq, nk): the second of `log_scores`, of all blocks."""
    return log_scores(_facts(packed), scale, valid)[1]


def _facts(packed: Packed) -> BlockFacts:
    """Facts about blocks as they are kept between quantize and route, in bf16: for `log_scores`
    alone, every query block reads them of each key block (docs/experiments.md, Precision of block
    statistics)."""
    operands = packed.operands
    return BlockFacts(
        operands.q_block_mean,
        operands.k_block_mean,
        operands.key_counts,
        packed.k_variance.bfloat16().float(),
        packed.v_block_mean.bfloat16().float(),
        packed.v_variance,
    )


def choose_blocks(
    packed: Packed,
    policy: SparsePolicy,
    head_settings: HeadSettings | None,
    *,
    scale: float,
    is_causal: bool = False,
) -> Choice:
    """Chooses blocks by `head_settings` and the rules of `policy` (all but its density).
    Without them the policy's density counts, by mass and without pooled keys.

    Forced blocks (exact tokens, sink, diagonal, self-similarity) take no part in the ranking and
    come on top of the density. With an order or head settings top-k makes `whole_steps`. An order
    says itself which tokens are exact; without one the policy's `exact_prefix` and `exact_suffix`
    do.
    """
    operands, device = packed.operands, packed.operands.key_counts.device
    valid = valid_blocks(operands, is_causal).expand(-1, operands.heads, -1, -1)
    forced, dense = _forced(packed, policy, valid, is_causal)
    ranked = valid & ~forced

    scores = mass_scores(packed, scale)
    if head_settings is not None and head_settings.pools:
        by_error = head_settings.router.to(device) == Router.ERROR
        errors = error_scores(packed, scale, valid)
        scores = torch.where(by_error[:, None, None], errors, scores)
    scores = scores.masked_fill(~ranked, -torch.inf)
    rank = rank_blocks(scores)
    if head_settings is None:
        counts, pools = kept_ranks(scores, policy, operands.heads), torch.zeros_like(valid)
    else:
        counts = _kept_ranks(scores, policy, head_settings)
        pools = (head_settings.pool_weight.to(device) > 0)[:, None, None] & head_settings.pools
    if policy.select_by == "topk" and (head_settings is not None or packed.order is not None):
        counts = whole_steps(counts, forced.sum(-1, keepdim=True))
    kept = forced | (ranked & (rank < counts)) | (dense & valid)
    pooled = poolable(packed, valid & ~kept & pools, is_causal)
    pairs = _pairs(packed, is_causal).unsqueeze(1).expand(kept.shape)
    return Choice(kept, pooled, rank.masked_fill(~ranked, -1), valid, pairs)


def poolable(packed: Packed, blocks: Tensor, is_causal: bool) -> Tensor:
    """Subset of `blocks` that a mean can stand for: under causal, rows must not see them in
    part.
    """
    if not is_causal:
        return blocks
    return blocks & ~touches_diagonal(blocks)


def _pairs(packed: Packed, is_causal: bool) -> Tensor:
    """(B, nq, nk) int64: query-key pairs of each block."""
    if packed.order is None:
        return block_pairs(packed.operands.n_queries, packed.operands.key_counts, is_causal)
    return packed.query_counts.long()[:, None] * packed.operands.key_counts.long()[:, None]


def _forced(
    packed: Packed, policy: SparsePolicy, valid: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Forced blocks (B, H, nq, nk), and query blocks that drop nothing, broadcastable to them."""
    operands, device = packed.operands, valid.device
    threshold = per_head(policy.simthreshd1, operands.heads, device).unsqueeze(-1)
    group = operands.heads // operands.kv_heads
    k_similarity = operands.k_self_similarity.repeat_interleave(group, 1)
    forced = ~(k_similarity > threshold).unsqueeze(-2)  # not "<=": a NaN is never dropped either
    dense = ~(operands.q_self_similarity > threshold)
    if packed.order is None:
        forced = forced | protected_keys(operands, policy)
        dense = dense | exact_query_blocks(operands, policy)
    else:
        forced = forced | packed.order.keys_exact
        dense = dense | packed.order.queries_exact
        if policy.attention_sink:
            forced = forced | (torch.arange(forced.shape[-1], device=device) == 0)
    if is_causal and policy.keep_diagonal:
        forced = forced | touches_diagonal(valid)
    return forced & valid, dense.unsqueeze(-1)


def _kept_ranks(scores: Tensor, policy: SparsePolicy, head_settings: HeadSettings) -> Tensor:
    """Number of ranked blocks that are asked for, broadcastable to the scores: at least the
    floor.
    """
    share = head_settings.density.to(scores.device)[:, None, None]
    if policy.select_by == "topk":
        return (share * scores.shape[-1]).long().clamp(min=head_settings.floor)
    weight = scores.softmax(-1).nan_to_num(0.0)  # a row that ranks nothing has no softmax
    within = weight.sort(dim=-1, descending=True, stable=True).values.cumsum(-1) <= share
    everything = share >= 1  # float32 sums may end a little above 1
    return (within | everything).sum(-1, keepdim=True).clamp(min=head_settings.floor)
