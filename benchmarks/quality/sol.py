# SPDX-License-Identifier: Apache-2.0
"""Attention of Sol-Attn and ComfyUI's `sol_attn`: one pooled term a query block for what it drops.

Operands are rounded to 8 bits as ours are on a Hopper GPU; sums are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.blocks import KEY_BLOCK, QUERY_BLOCK
from sparge.order.grid import TokenOrder
from sparge.policy import SparsePolicy
from sparge.reference import Operands, block_scores, route

BLOCKS_AT_ONCE = 32  # query blocks: logits of 21,000 keys then take 340 MB
INT8_MAX, E4M3_MAX, LEAST = 127.0, 448.0, 1e-30


def sol_attention(
    q: Tensor, k: Tensor, v: Tensor, share: float, order: TokenOrder | None
) -> tuple[Tensor, float]:
    """Attention (B, H, N, D) float32 that keeps `share` of the key blocks, and its density.

    A dropped block of n keys adds n exp(qbar . kbar) to the row sum and as much of its mean value
    to the output of every row, as if every query were the mean of its block.
    """
    x, scale = Operands.of(q, k, v, order), q.shape[-1] ** -0.5
    routed = route(x, SparsePolicy(topk=share), scale=scale)
    counts = x.key_counts
    visible = torch.arange(KEY_BLOCK, device=q.device) < counts.unsqueeze(-1)  # (B, nk, 64)
    pooled = block_scores(x, scale) + counts.float().log()[:, None, None]
    pooled = pooled.masked_fill(~routed.valid | routed.kept, -torch.inf)
    queries, keys = _int8(x.q, (-1,)) * scale, _int8(x.k, (-2, -1))
    of_channels = (x.v.abs().amax((2, 3), keepdim=True) / E4M3_MAX).clamp(min=LEAST)
    values = (x.v / of_channels).to(torch.float8_e4m3fn).float() * of_channels
    out = torch.empty_like(queries)
    for b in range(q.shape[0]):
        for h in range(x.heads):
            own = h * x.kv_heads // x.heads
            key = keys[b, own].flatten(0, 1)
            value = torch.cat([values[b, own].flatten(0, 1), x.v_block_mean[b, own]])
            for first in range(0, queries.shape[2], BLOCKS_AT_ONCE):
                blocks = slice(first, first + BLOCKS_AT_ONCE)
                query = queries[b, h, blocks]
                seen = (routed.kept[b, h, blocks].unsqueeze(-1) & visible[b]).flatten(1)
                exact = (query @ key.T).masked_fill(~seen.unsqueeze(1), -torch.inf)
                of_rows = pooled[b, h, blocks].unsqueeze(1).expand(-1, QUERY_BLOCK, -1)
                weights = torch.cat([exact, of_rows], -1).softmax(-1)
                out[b, h, blocks] = weights @ value + x.vbar[b, own]
    return x.by_token(out.flatten(2, 3)), routed.density()


def _int8(x: Tensor, shared: tuple[int, ...]) -> Tensor:
    """x with INT8 levels, whose scale is shared along these dimensions."""
    step = (x.abs().amax(shared, keepdim=True) / INT8_MAX).clamp(min=LEAST)
    return (x / step).round() * step
