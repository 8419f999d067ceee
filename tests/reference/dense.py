# SPDX-License-Identifier: Apache-2.0
"""Attention with pooled blocks straight from its definition: all logits, in float64.

Shares no code with the library. Blocks are lists of token numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def blocks_of(order, tokens: int, size: int) -> list[list[int]]:
    """Tokens of each block of `size` slots, in the order's slots or one after another."""
    slots = list(range(tokens)) if order is None else order.slot_token.tolist()
    return [
        [token for token in slots[start : start + size] if token >= 0]
        for start in range(0, len(slots), size)
    ]


def dense_pooled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    pooled: Tensor,
    gain: Sequence[float],
    *,
    order=None,
    is_causal: bool = False,
    scale: float = 1.0,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, Nq, D) and natural log-sum-exp (B, H, Nq)."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    queries, keys = blocks_of(order, q.shape[2], 128), blocks_of(order, k.shape[2], 64)
    for b in range(q.shape[0]):
        length = k.shape[2] if lengths is None else lengths[b]
        for h in range(q.shape[1]):
            kv = h * k.shape[1] // q.shape[1]
            for i, rows in enumerate(queries):
                logits: list[Tensor] = []
                values: list[Tensor] = []
                for j, block in enumerate(keys):
                    tokens = [token for token in block if token < length]
                    if kept[b, h, i, j]:
                        unseen = torch.tensor(
                            [[is_causal and token > row for token in tokens] for row in rows]
                        ).view(len(rows), len(tokens))
                        exact = q[b, h, rows] @ k[b, kv, tokens].T * scale
                        logits.append(exact.masked_fill(unseen.bool(), -math.inf))
                        values.append(v[b, kv, tokens])
                    elif pooled[b, h, i, j]:
                        assert tokens, "an empty block has no mean"
                        assert not is_causal or max(tokens) <= min(rows), "a mean of unseen keys"
                        mean = k[b, kv, tokens].mean(0, keepdim=True)
                        weight = math.log(len(tokens) * gain[h])
                        logits.append(q[b, h, rows] @ mean.T * scale + weight)
                        values.append(v[b, kv, tokens].mean(0, keepdim=True))
                if logits:
                    row_logits = torch.cat(logits, 1)
                    lse[b, h, rows] = row_logits.logsumexp(1)
                    shares = (row_logits - lse[b, h, rows].unsqueeze(1)).exp()
                    out[b, h, rows] = shares.nan_to_num(0.0) @ torch.cat(values)
    return out, lse
