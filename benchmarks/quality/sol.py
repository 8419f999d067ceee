# SPDX-License-Identifier: Apache-2.0
"""Attention of Sol-Attn and ComfyUI's `sol_attn`: one pooled term a query block for what it drops.

Operands are quantized to 8 bits as ours are; sums are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.blocks import KEY_BLOCK, QUERY_BLOCK
from sparge.kernels.spec import Element
from sparge.order.grid import TokenOrder
from sparge.policy import SparsePolicy
from sparge.reference import block_scores, quantize_qkv, route, scatter

BLOCKS_AT_ONCE = 32  # query blocks: logits of 21,000 keys then take 340 MB


def sol_attention(
    q: Tensor, k: Tensor, v: Tensor, share: float, order: TokenOrder | None
) -> tuple[Tensor, float]:
    """Attention (B, H, N, D) float32 that keeps `share` of the key blocks, and its density.

    A dropped block of n keys adds n exp(qbar . kbar) to the row sum and as much of its mean value
    to the output of every row, as if every query were the mean of its block.
    """
    x, scale = quantize_qkv(q, k, v, order, element=Element.INT8_E4M3), q.shape[-1] ** -0.5
    routed = route(x, SparsePolicy(topk=share), scale=scale)
    counts = x.key_counts
    visible = torch.arange(KEY_BLOCK, device=q.device) < counts.unsqueeze(-1)  # (B, nk, 64)
    pooled = block_scores(x, scale) + counts.float().log()[:, None, None]
    pooled = pooled.masked_fill(~routed.valid | routed.kept, -torch.inf)
    queries = x.q_levels.float() * x.q_scale.unsqueeze(-1) * scale
    keys = _blocks(x.k_levels.float()) * x.k_scale[..., None, None]
    values = _blocks(x.v_levels.float()) * x.v_scale[:, :, None, None]
    group, nk = x.heads // x.kv_heads, counts.shape[1]
    out = torch.empty_like(queries)
    for b in range(x.batch):
        for h in range(x.heads):
            own = h // group
            key, value = (x[b, own].flatten(0, 1)[: nk * KEY_BLOCK] for x in (keys, values))
            value = torch.cat([value, x.v_block_mean[b, own]]) + x.vbar[b, own]
            for first in range(0, routed.kept.shape[2], BLOCKS_AT_ONCE):
                blocks = slice(first, first + BLOCKS_AT_ONCE)
                rows = slice(first * QUERY_BLOCK, (first + BLOCKS_AT_ONCE) * QUERY_BLOCK)
                query = queries[b, h, rows]
                seen = routed.kept[b, h, blocks].unsqueeze(-1) & visible[b]
                exact = (query @ key.T).masked_fill(~_rows(seen.flatten(1), query), -torch.inf)
                logits = torch.cat([exact, _rows(pooled[b, h, blocks], query)], -1)
                out[b, h, rows] = logits.softmax(-1) @ value
    return scatter(out, x.order), routed.density()


def _blocks(rows: Tensor) -> Tensor:
    """(B, H, N, D) to (B, H, blocks, 64, D), zeros at the end."""
    short = -rows.shape[2] % KEY_BLOCK
    return torch.nn.functional.pad(rows, (0, 0, 0, short)).unflatten(2, (-1, KEY_BLOCK))


def _rows(of_blocks: Tensor, queries: Tensor) -> Tensor:
    """Values of query blocks, one row a query."""
    return of_blocks.repeat_interleave(QUERY_BLOCK, 0)[: len(queries)]
