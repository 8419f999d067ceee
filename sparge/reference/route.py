# SPDX-License-Identifier: Apache-2.0
"""Stage route: which key blocks each query block keeps, and which it pools. It sorts, since it need
not be fast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK, block_pairs, touches_diagonal, whole_steps
from ..head_settings import HeadSettings, Router
from ..policy import PerHead, SparsePolicy
from .operands import Operands, by_query_head, per_head
from .scores import block_scores, log_mass, log_scores


@dataclass(frozen=True, eq=False)
class Route:
    """Fate of each (query block, key block); all (B, H, nq, nk)."""

    kept: Tensor  # bool: computed exactly
    pooled: Tensor  # bool: stands in the softmax as one pseudo-key
    pairs: Tensor  # int64: query-key pairs of each block, kept or not

    @property
    def valid(self) -> Tensor:
        """Whether the block holds a pair."""
        return self.pairs > 0

    def kept_pairs(self) -> Tensor:
        """(B, H) int64: query-key pairs inside the kept blocks."""
        return (self.pairs * self.kept).sum((-2, -1))

    def valid_pairs(self) -> Tensor:
        """(B, H) int64: query-key pairs inside all blocks."""
        return self.pairs.sum((-2, -1))

    def kept_blocks(self) -> Tensor:
        """(B, H) int64: kept blocks that hold a pair."""
        return (self.kept & self.valid).sum((-2, -1))

    def density(self) -> float:
        """Share of pairs that are kept, over all heads (1 when there are none)."""
        valid = int(self.valid_pairs().sum())
        return int(self.kept_pairs().sum()) / valid if valid else 1.0


def route(
    x: Operands,
    policy: SparsePolicy,
    head_settings: HeadSettings | None = None,
    *,
    scale: float,
    is_causal: bool = False,
    block_mask: Tensor | None = None,
) -> Route:
    """Chooses blocks by the rules of `policy`, at the density of `head_settings` where they are
    given; or takes those of `block_mask` (B, H, nq, nk) that hold a pair, and what is exact.

    Forced blocks (exact tokens, sink, diagonal, self-similarity) take no part in the ranking and
    come on top of the density. An order says itself which tokens are exact; without one the
    policy's `exact_prefix` and `exact_suffix` do.

    Without an order and head settings the semantics are upstream's: ragged blocks rank as whole
    ones do, and top-k makes no `whole_steps`.
    """
    pairs = _pairs(x, is_causal)
    valid = pairs > 0
    nothing = torch.zeros_like(valid)
    exact = _exact(x, policy) & valid
    if block_mask is not None:
        return Route((block_mask.bool() & valid) | exact, nothing, pairs)
    forced, dense = _forced(x, policy, valid, is_causal)
    forced = forced | exact
    ranked = valid & ~forced

    upstream = x.order is None and head_settings is None
    scores = block_scores(x, scale) if upstream else _scores(x, head_settings, scale, valid)
    scores = scores.masked_fill(~ranked, -torch.inf)
    rank = rank_blocks(scores)
    if head_settings is None:
        counts, pools = kept_ranks(scores, policy, policy.selection), nothing
    else:
        counts = kept_ranks(scores, policy, head_settings.density)
        pools = (head_settings.pool_weight > 0)[:, None, None].to(valid.device)
        pools = pools & head_settings.pools
    if policy.select_by == "topk" and not upstream:
        counts = whole_steps(counts, forced.sum(-1, keepdim=True))
    kept = forced | (ranked & (rank < counts)) | (dense & valid)
    pooled = poolable(valid & ~kept & pools, is_causal)
    return Route(kept, pooled, pairs)


def _scores(x: Operands, head_settings: HeadSettings | None, scale: float, valid: Tensor) -> Tensor:
    if head_settings is None or not head_settings.pools:
        return log_mass(x, scale)
    by_mass, by_error = log_scores(x, scale, valid)
    takes_error = head_settings.router.to(by_mass.device) == Router.ERROR
    return torch.where(takes_error[:, None, None], by_error, by_mass)


def poolable(blocks: Tensor, is_causal: bool) -> Tensor:
    """Subset of `blocks` that a mean can stand for: under causal, rows must not see them in
    part.
    """
    return blocks & ~touches_diagonal(blocks) if is_causal else blocks


def rank_blocks(scores: Tensor) -> Tensor:
    """Place of each block in descending order of score; ties go to the lower index."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def kept_ranks(scores: Tensor, policy: SparsePolicy, share: PerHead) -> Tensor:
    """Number of ranked blocks to keep, at least one, broadcastable to the scores (B, H, nq, nk): a
    share of all blocks, or of the mass of the ranked ones."""
    key_blocks = scores.shape[-1]
    shares = per_head(share, scores.shape[1], scores.device)[:, None, None]
    if policy.select_by == "topk":
        if isinstance(share, Tensor):
            return (shares * key_blocks).long().clamp(min=1)
        return torch.full_like(shares, max(1, int(share * key_blocks)), dtype=torch.int64)
    mass = scores.softmax(-1).nan_to_num(0.0)  # a row that ranks nothing has no softmax
    within = mass.sort(dim=-1, descending=True, stable=True).values.cumsum(-1) <= shares
    everything = shares >= 1  # float32 sums may end a little above 1
    return (within | everything).sum(-1, keepdim=True).clamp(min=1)


def _pairs(x: Operands, is_causal: bool) -> Tensor:
    """(B, H, nq, nk) int64: query-key pairs of each block."""
    if x.order is None:
        pairs = block_pairs(x.n_queries, x.key_counts, is_causal)
    else:
        pairs = x.query_counts.long()[:, None] * x.key_counts.long()[:, None]
    return pairs.unsqueeze(1).expand(-1, x.heads, -1, -1)


def _exact(x: Operands, policy: SparsePolicy) -> Tensor:
    """Blocks (B or 1, 1, nq, nk) that a mask keeps too: of exact queries or keys, and the sink."""
    if x.order is None:
        lengths = x.key_counts.sum(-1, keepdim=True)
        keys = _holds_exact(x.key_counts, KEY_BLOCK, lengths, policy)[:, None, None]
        queries = _holds_exact(x.query_counts, QUERY_BLOCK, x.n_queries, policy)
    else:
        keys, queries = x.order.keys_exact[None, None, None], x.order.queries_exact
    if policy.attention_sink:
        keys = keys | (torch.arange(keys.shape[-1], device=keys.device) == 0)
    return keys | queries.unsqueeze(-1)


def _forced(
    x: Operands, policy: SparsePolicy, valid: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Forced blocks (B, H, nq, nk) beside exact ones, and query blocks that drop nothing."""
    threshold = per_head(policy.simthreshd1, x.heads, valid.device).unsqueeze(-1)
    similar = by_query_head(x.k_self_similarity, x.heads) > threshold
    dense = ~(x.q_self_similarity > threshold)  # not "<=": a NaN is never dropped either
    forced = ~similar.unsqueeze(-2)
    if is_causal and policy.keep_diagonal:
        forced = forced | touches_diagonal(valid)
    return forced & valid, dense.unsqueeze(-1)


def _holds_exact(counts: Tensor, size: int, length: Tensor | int, policy: SparsePolicy) -> Tensor:
    """Whether each block, `counts` (..., n) tokens of `size`, holds an exact token. The suffix ends
    at the last valid token: for keys that is the batch entry's key length."""
    starts = torch.arange(counts.shape[-1], device=counts.device) * size
    return (starts < policy.exact_prefix) | (starts + counts > length - policy.exact_suffix)
