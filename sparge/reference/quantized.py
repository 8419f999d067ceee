# SPDX-License-Identifier: Apache-2.0
"""Operands and block statistics of one call, by slot where there is a token order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.spec import Element
from ..order.grid import EMPTY, TokenOrder
from .arithmetic import LOG2_E


@dataclass(frozen=True, eq=False)
class Quantized:
    """Q, K, V as the attend stage reads them, and statistics of their blocks.

    Nq and Nk count slots where there is an order. nq = ceil(Nq / 128), nk = ceil(Nk / 64).

    Levels times scales give the stored value: Q as it is, K around kbar, V around vbar. Without
    quantization the levels are bf16 or fp16 values, all scales are 1 and both means are 0.
    Rows at or beyond a batch entry's key length, and empty slots, are zero. Everything else is
    float32. Statistics are over the valid rows of each block, 0 for a block without any. Variances
    are around the block's own mean and divided by the count.
    """

    element: Element
    order: TokenOrder | None
    q_levels: Tensor  # (B, H, Nq, D) int8, or bf16 / fp16
    k_levels: Tensor  # (B, Hkv, Nk, D) int8, or bf16 / fp16
    v_levels: Tensor  # (B, Hkv, Nk, D) fp16, e4m3, int8 or bf16
    q_scale: Tensor  # (B, H, Nq)
    k_scale: Tensor  # (B, Hkv, nk)
    v_scale: Tensor  # (B, Hkv, D)
    v_block_scale: Tensor  # (B, Hkv, nk), factors on v_scale: 1 where values are no integers
    kbar: Tensor  # (B, Hkv, D)
    vbar: Tensor  # (B, Hkv, D)
    q_block_mean: Tensor  # (B, H, nq, D)
    k_block_mean: Tensor  # (B, Hkv, nk, D), of K - kbar
    v_block_mean: Tensor  # (B, Hkv, nk, D), of V - vbar
    k_variance: Tensor  # (B, Hkv, nk, D)
    v_variance: Tensor  # (B, Hkv, nk), summed over channels
    q_self_similarity: Tensor  # (B, H, nq)
    k_self_similarity: Tensor  # (B, Hkv, nk), of K - kbar
    q_dot_kbar: Tensor  # (B, H, Nq): what centring K took from each logit of the row, unscaled
    finite: Tensor  # (B, Hkv) bool: all keys and values are; else every row of the head is NaN
    query_counts: Tensor  # (nq,) queries of each query block
    key_counts: Tensor  # (B, nk) int32
    key_lengths: Tensor | None  # (B,) int32

    @property
    def batch(self) -> int:
        return self.q_levels.shape[0]

    @property
    def heads(self) -> int:
        return self.q_levels.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k_levels.shape[1]

    @property
    def n_queries(self) -> int:
        return self.q_levels.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q_levels.shape[3]

    @property
    def occupied(self) -> Tensor:
        """(Nq,) bool: whether the row is a query and not an empty slot."""
        if self.order is not None:
            return self.order.slot_token != EMPTY
        return torch.ones(self.n_queries, dtype=torch.bool, device=self.query_counts.device)

    def row_factors(self, b: int, h: int, rows: slice, scale: float) -> Tensor:
        """(rows,) factors of query head h: levels of Q and K times it and the K scale are logits,
        in log2 units."""
        factors = self.q_scale[b, h, rows] * (scale * LOG2_E)
        finite = self.finite[b, h * self.kv_heads // self.heads]
        return torch.where(finite, factors, torch.nan)


def gather(rows: Tensor, order: TokenOrder | None) -> Tensor:
    """(..., tokens, D) to (..., slots, D), zeros in the empty slots; as they come without an
    order."""
    if order is None:
        return rows
    packed = rows[..., order.slot_token.clamp(min=0).long(), :]
    return packed.masked_fill((order.slot_token == EMPTY).unsqueeze(-1), 0)


def scatter(packed: Tensor, order: TokenOrder | None) -> Tensor:
    """(B, H, slots, ...) to (B, H, tokens, ...)."""
    return packed if order is None else packed[:, :, order.token_slot.long()]


def blocked(rows: Tensor, size: int) -> Tensor:
    """(N, D) to (ceil(N / size), size, D), zero-padded."""
    return pad(rows, (0, 0, 0, -rows.shape[0] % size)).unflatten(0, (-1, size))


def by_query_head(of_keys: Tensor, heads: int) -> Tensor:
    """Repeats (B, Hkv, ...) to (B, heads, ...)."""
    return of_keys.repeat_interleave(heads // of_keys.shape[1], 1)
