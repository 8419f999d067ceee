# SPDX-License-Identifier: Apache-2.0
"""Block maps of a policy for blocks of any size: the library's kernels have one size.

Plain torch on the tensors' device, by the rules of stage route, from float32 block statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from ..blocks import block_count
from ..checks.validate import as_heads_first, check_pair
from ..errors import Unsupported
from ..policy import SparsePolicy
from ..reference.route import kept_ranks, per_head, rank_blocks

INT8_MAX = 127.0


@torch.no_grad()
def choose_blocks(
    q: Tensor, k: Tensor, policy: SparsePolicy, query_block: int, key_block: int, is_causal: bool
) -> Tensor:
    """Bool map (B, H, ceil(Nq / query_block), ceil(Nk / key_block)) of q and k, heads first.

    Raises:
        Unsupported: is_causal with another number of keys than of queries, or a dtype or head_dim
            that attention does not take.
        ValueError: shapes or block sizes that do not fit together.
    """
    q, k = as_heads_first("q", q, "HND"), as_heads_first("k", k, "HND")
    check_pair(q, k)
    if min(query_block, key_block) < 1:
        raise ValueError(
            f"BLKQ is {query_block} and BLKK {key_block}; a block has at least one token."
        )
    if is_causal and q.shape[2] != k.shape[2]:
        raise Unsupported(
            f"is_causal with {q.shape[2]} queries and {k.shape[2]} keys does not say which keys a "
            "query sees: give as many keys as queries."
        )
    heads = q.shape[1]
    group = heads // k.shape[1]
    q_means, q_similarity = _statistics(q, query_block)
    k_means, k_similarity = (x.repeat_interleave(group, 1) for x in _statistics(k, key_block))
    valid = _seen(q.shape[2], k.shape[2], query_block, key_block, is_causal, q.device)
    threshold = per_head(policy.simthreshd1, heads, q.device).unsqueeze(-1)
    forced = ~(k_similarity > threshold).unsqueeze(-2)  # not "<=": a NaN is never dropped either
    if policy.attention_sink:
        forced[..., 0] = True
    ranked = valid & ~forced
    scores = q_means @ k_means.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~ranked, -torch.inf)
    kept = ranked & (rank_blocks(scores) < kept_ranks(scores, policy, policy.selection))
    return (kept | forced | ~(q_similarity > threshold).unsqueeze(-1)) & valid


def int8_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Levels and scales: x (B, H, N, D) as INT8 levels of its shape, and a scale (B, H, ceil(N /
    block)) of each block.

    Levels times scale give x; a block of zeros has scale 0.
    """
    blocks = _blocked(x, block)
    scale = blocks.abs().amax((-2, -1)) / INT8_MAX
    levels = (blocks / scale.masked_fill(scale == 0, 1)[..., None, None]).round()
    return levels.to(torch.int8).flatten(2, 3)[:, :, : x.shape[2]].contiguous(), scale


def _statistics(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Mean (B, H, n, D) of each block's rows, and its self-similarity (B, H, n): the squared length
    of the mean of its rows' directions."""
    blocks = _blocked(x, block)
    starts = torch.arange(blocks.shape[2], device=x.device) * block
    rows = (x.shape[2] - starts).clamp(max=block).unsqueeze(-1)
    directions = normalize(blocks, dim=-1, eps=torch.finfo(torch.float32).tiny)
    return blocks.sum(3) / rows, (directions.sum(3) / rows).square().sum(-1)


def _blocked(x: Tensor, block: int) -> Tensor:
    """(B, H, N, D) to float32 (B, H, ceil(N / block), block, D), zero-padded."""
    return pad(x.float(), (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, block))


def _seen(
    queries: int,
    keys: int,
    query_block: int,
    key_block: int,
    is_causal: bool,
    device: torch.device,
) -> Tensor:
    """(nq, nk): whether some query of the block sees some key of the block."""
    rows = torch.arange(1, block_count(queries, query_block) + 1, device=device) * query_block
    first_key = torch.arange(block_count(keys, key_block), device=device) * key_block
    last_row = rows.clamp(max=queries) - 1 if is_causal else torch.full_like(rows, keys)
    return first_key <= last_row.unsqueeze(-1)
