# SPDX-License-Identifier: Apache-2.0
"""Attention without quantization over a block map: what a kernel's output is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK, BlockPlan

MAX_LOGITS = 1 << 24  # logits held at a time: 64 MiB in float32


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: BlockPlan | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, H, Nq, D) over k, v (B, Hkv, Nk, D), every operation in `dtype`.

    `plan` names the blocks to keep (all of them by default); only its map is read, so `is_causal`
    and `key_lengths` must be given again. Returns out (B, H, Nq, D) and the natural log-sum-exp
    (B, H, Nq), both in `dtype`; a row that sees no key gives 0 and -inf.
    """
    batch, heads, n_queries, head_dim = q.shape
    n_keys, group = k.shape[2], heads // k.shape[1]
    logit_scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(batch, heads, n_queries, v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, n_queries), -torch.inf, dtype=dtype, device=q.device)
    kept = None if plan is None else plan.kept()
    blocks_at_once = max(1, MAX_LOGITS // (QUERY_BLOCK * max(n_keys, 1)))
    for b in range(batch):
        length = n_keys if key_lengths is None else min(n_keys, int(key_lengths[b]))
        if length <= 0:
            continue
        for h in range(heads):
            keys = k[b, h // group, :length].to(dtype)
            values = v[b, h // group, :length].to(dtype)
            for start in range(0, n_queries, blocks_at_once * QUERY_BLOCK):
                rows = torch.arange(
                    start, min(start + blocks_at_once * QUERY_BLOCK, n_queries), device=q.device
                )
                logits = q[b, h, rows].to(dtype) @ keys.T * logit_scale
                if kept is not None:
                    columns = kept[b, h].repeat_interleave(KEY_BLOCK, -1)[:, :length]
                    logits = logits.masked_fill(~columns[rows // QUERY_BLOCK], -torch.inf)
                if is_causal:
                    future = torch.arange(length, device=q.device) > rows.unsqueeze(-1)
                    logits = logits.masked_fill(future, -torch.inf)
                lse[b, h, rows] = logits.logsumexp(-1)
                blind = (lse[b, h, rows] == -torch.inf).unsqueeze(-1)
                out[b, h, rows] = logits.softmax(-1).masked_fill(blind, 0) @ values
    return out, lse
