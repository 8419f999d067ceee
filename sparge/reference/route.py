# SPDX-License-Identifier: Apache-2.0
"""Stage route: which key blocks each query block keeps. It sorts, since it need not be fast."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK, BlockPlan, touches_diagonal
from ..policy import PerHead, SparsePolicy
from .quantize import Quantized


def block_scores(quantized: Quantized, scale: float) -> Tensor:
    """(B, H, nq, nk) float32: mean query . mean centred key * scale."""
    group = quantized.heads // quantized.kv_heads
    key_means = quantized.k_block_mean.repeat_interleave(group, 1)
    return quantized.q_block_mean @ key_means.transpose(-1, -2) * scale


def route(
    quantized: Quantized,
    policy: SparsePolicy,
    *,
    scale: float,
    is_causal: bool = False,
    block_mask: Tensor | None = None,
) -> BlockPlan:
    """Makes the plan of `policy` from the block statistics, or from `block_mask` (B, H, nq, nk)
    alone."""
    valid = valid_blocks(quantized, is_causal)
    if block_mask is not None:
        kept = block_mask.bool() & valid
    else:
        kept = _select(quantized, policy, scale, is_causal, valid)
    return BlockPlan.from_kept(
        kept, quantized.n_queries, quantized.n_keys, is_causal, quantized.key_lengths
    )


def _select(
    quantized: Quantized, policy: SparsePolicy, scale: float, is_causal: bool, valid: Tensor
) -> Tensor:
    heads, device = quantized.heads, valid.device
    threshold = per_head(policy.simthreshd1, heads, device).unsqueeze(-1)
    group = heads // quantized.kv_heads
    k_similarity = quantized.k_self_similarity.repeat_interleave(group, 1)

    never_dropped = ~(k_similarity > threshold)  # not "<=": a NaN is never dropped either
    forced = valid & (never_dropped.unsqueeze(-2) | protected_keys(quantized, policy))
    if is_causal and policy.keep_diagonal:
        forced = forced | (valid & touches_diagonal(valid))
    dense = ~(quantized.q_self_similarity > threshold) | exact_query_blocks(quantized, policy)

    ranked = valid & ~forced
    scores = block_scores(quantized, scale).masked_fill(~ranked, -torch.inf)
    chosen = ranked & (rank_blocks(scores) < kept_ranks(scores, policy, heads))
    return forced | chosen | (dense.unsqueeze(-1) & valid)


def rank_blocks(scores: Tensor) -> Tensor:
    """Place of each block in descending order of score; ties go to the lower index."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def kept_ranks(scores: Tensor, policy: SparsePolicy, heads: int) -> Tensor:
    """Number of ranked blocks to keep, broadcastable to the scores."""
    if policy.select_by == "topk":
        return _share_of(policy.topk, scores.shape[-1], heads, scores.device)
    threshold = per_head(policy.cdfthreshd, heads, scores.device)[:, None, None]
    mass = scores.softmax(-1).nan_to_num(0.0)  # a row that ranks nothing has no softmax
    within = mass.sort(dim=-1, descending=True, stable=True).values.cumsum(-1) <= threshold
    everything = threshold >= 1  # float32 sums may end a little above 1
    return (within | everything).sum(-1, keepdim=True).clamp(min=1)


def _share_of(share: PerHead, key_blocks: int, heads: int, device: torch.device) -> Tensor:
    """(H, 1, 1): max(1, int(share * key_blocks)) of each head."""
    if not isinstance(share, Tensor):
        count = max(1, int(share * key_blocks))
        return torch.full((heads, 1, 1), count, device=device)
    counts = (per_head(share, heads, device) * key_blocks).long()
    return counts.clamp(min=1)[:, None, None]


def valid_blocks(quantized: Quantized, is_causal: bool) -> Tensor:
    """(B, 1, nq, nk): the block has a key, and under causal a key that some query may see."""
    device = quantized.key_counts.device
    valid = (quantized.key_counts > 0)[:, None, None, :]
    query_blocks = quantized.q_block_mean.shape[2]
    if not is_causal:
        return valid.expand(-1, -1, query_blocks, -1)
    last_row = (_starts(query_blocks, QUERY_BLOCK, device) + QUERY_BLOCK - 1).clamp(
        max=quantized.n_queries - 1
    )
    first_key = _starts(quantized.key_counts.shape[1], KEY_BLOCK, device)
    return valid & (first_key <= last_row.unsqueeze(-1))


def protected_keys(quantized: Quantized, policy: SparsePolicy) -> Tensor:
    """(B, 1, 1, nk): the key block holds an exact token, or is the sink."""
    starts = _starts(quantized.key_counts.shape[1], KEY_BLOCK, quantized.key_counts.device)
    lengths = quantized.key_counts.sum(-1, keepdim=True)
    protected = _holds_exact(starts, quantized.key_counts, lengths, policy)
    if policy.attention_sink:
        protected = protected | (starts == 0)
    return protected[:, None, None, :]


def exact_query_blocks(quantized: Quantized, policy: SparsePolicy) -> Tensor:
    """(nq,): the query block holds an exact token."""
    device, queries = quantized.q_block_mean.device, quantized.n_queries
    starts = _starts(quantized.q_block_mean.shape[2], QUERY_BLOCK, device)
    rows = (queries - starts).clamp(max=QUERY_BLOCK)
    return _holds_exact(starts, rows, queries, policy)


def _holds_exact(
    starts: Tensor, counts: Tensor, length: Tensor | int, policy: SparsePolicy
) -> Tensor:
    """Whether each block holds an exact token. The suffix ends at the last valid token: for keys
    that is the batch entry's key length."""
    return (starts < policy.exact_prefix) | (starts + counts > length - policy.exact_suffix)


def _starts(blocks: int, size: int, device: torch.device) -> Tensor:
    return torch.arange(blocks, device=device) * size


def per_head(value: PerHead, heads: int, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=device).expand(heads)
