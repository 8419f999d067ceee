# SPDX-License-Identifier: Apache-2.0
"""Attention without quantization and without packing: what a kernel's output is compared with.

An order is nothing but the block that each token belongs to: tokens stay where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK
from ..order.grid import TokenOrder
from ..policy import PerHead


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor | None = None,
    pooled: Tensor | None = None,
    pool_weight: PerHead = 1.0,
    *,
    output_scale: PerHead = 1.0,
    mean_values: Tensor | None = None,
    order: TokenOrder | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, H, Nq, D) over k, v (B, Hkv, Nk, D), every operation in `dtype`.

    kept: (B, H, nq, nk) bool, blocks whose keys take part; all of them by default.
    pooled: (B, H, nq, nk) bool, blocks that take part as one key, the mean of theirs, with the
        weight of n keys times the pool weight.
    output_scale: factor of the distance from the mean value, where any block is dropped.
    mean_values: (B, Hkv, D), where they are not to be the means of all keys' values.

    Returns out (B, H, Nq, D) and the natural log-sum-exp (B, H, Nq); a row that sees no key gives 0
    and -inf.
    """
    batch, heads, n_queries, head_dim = q.shape
    n_keys, group = k.shape[2], heads // k.shape[1]
    logit_scale = head_dim**-0.5 if scale is None else scale
    query_block, key_block = _blocks(order, n_queries, n_keys, q.device)
    query_blocks, key_blocks = int(query_block.max()) + 1, int(key_block.max()) + 1
    out = torch.zeros(batch, heads, n_queries, v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, n_queries), -torch.inf, dtype=dtype, device=q.device)
    pool_weights, output_scales = (
        torch.as_tensor(x, dtype=dtype, device=q.device).expand(heads)
        for x in (pool_weight, output_scale)
    )
    for b in range(batch):
        length = n_keys if key_lengths is None else min(n_keys, int(key_lengths[b]))
        if length <= 0:
            continue
        block = key_block[:length]
        counts = torch.bincount(block, minlength=key_blocks).to(dtype)
        for h in range(heads):
            keys = k[b, h // group, :length].to(dtype)
            values = v[b, h // group, :length].to(dtype)
            key_means, value_means = (_block_means(x, block, counts) for x in (keys, values))
            if mean_values is None:
                mean_value = values.mean(0, keepdim=True)
            else:
                mean_value = mean_values[b, h // group, None].to(dtype)
            weight = (counts * pool_weights[h]).log()
            for i in range(query_blocks):
                rows = (query_block == i).nonzero().squeeze(-1)
                queries = q[b, h, rows].to(dtype) * logit_scale
                logits, seen = queries @ keys.T, values
                if kept is not None:
                    logits = logits.masked_fill(~kept[b, h, i, block], -torch.inf)
                if is_causal:
                    future = torch.arange(length, device=q.device) > rows.unsqueeze(-1)
                    logits = logits.masked_fill(future, -torch.inf)
                if pooled is not None:
                    pseudo = queries @ key_means.T + weight
                    pseudo = pseudo.masked_fill(~pooled[b, h, i], -torch.inf)
                    logits, seen = torch.cat([logits, pseudo], -1), torch.cat([values, value_means])
                lse[b, h, rows] = logits.logsumexp(-1)
                blind = (lse[b, h, rows] == -torch.inf).unsqueeze(-1)
                found = logits.softmax(-1).masked_fill(blind, 0) @ seen
                if kept is not None and ((counts > 0) & ~kept[b, h, i]).any():
                    spread = mean_value + output_scales[h] * (found - mean_value)
                    found = spread.masked_fill(blind, 0)
                out[b, h, rows] = found
    return out, lse


def _blocks(
    order: TokenOrder | None, n_queries: int, n_keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Numbers of the query block of each query and of the key block of each key."""
    if order is not None:
        slot = order.on(device).token_slot.long()
        return slot // QUERY_BLOCK, slot // KEY_BLOCK
    return (
        torch.arange(n_queries, device=device) // QUERY_BLOCK,
        torch.arange(n_keys, device=device) // KEY_BLOCK,
    )


def _block_means(rows: Tensor, block: Tensor, counts: Tensor) -> Tensor:
    """(nk, D): mean of the rows (N, D) of each block, 0 for an empty block."""
    sums = rows.new_zeros(counts.shape[0], rows.shape[1]).index_add_(0, block, rows)
    return sums / counts.clamp(min=1).unsqueeze(-1)
