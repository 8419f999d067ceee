# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values of a call by block, in float32, and statistics of the blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import KEY_BLOCK, QUERY_BLOCK, count_keys
from ..order.grid import EMPTY, TokenOrder
from ..policy import PerHead

# Means are sums of numbers times this, so that sums of large numbers do not overflow.
SUM_UNIT = 2.0**-24


@dataclass(frozen=True, eq=False)
class Operands:
    """Operands of one call, and statistics of their blocks, made when they are asked for.

    nq = ceil(Nq / 128) and nk = ceil(Nk / 64), of slots where there is an order. Rows at or beyond
    a batch entry's key length, empty slots, and what fills the last block are zero. Statistics are
    over the valid rows of each block, 0 for a block without any.
    """

    order: TokenOrder | None
    order_kind: Tensor | None  # (Hkv,) int64, token order of each KV head
    q: Tensor  # (B, H, nq, 128, D)
    k: Tensor  # (B, Hkv, nk, 64, D) around kbar
    v: Tensor  # (B, Hkv, nk, 64, D) around vbar
    kbar: Tensor  # (B, Hkv, D)
    vbar: Tensor  # (B, Hkv, D)
    finite: Tensor  # (B, Hkv) bool: all keys and values are; else every row of the head is NaN
    query_counts: Tensor  # (nq,) queries of each query block
    key_counts: Tensor  # (B, nk) int32

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        order: TokenOrder | None = None,
        order_kind: Tensor | None = None,
        *,
        smooth_k: bool = True,
        key_lengths: Tensor | None = None,
        kbar: Tensor | None = None,
        vbar: Tensor | None = None,
    ) -> Operands:
        """Takes q (B, H, Nq, D), k and v (B, Hkv, Nk, D); float32 inputs read as bf16.

        order_kind: (H,) int, the token order of each head, the last for a number beyond; heads that
            share keys take that of the first of them. None: the first order.
        smooth_k: keys are taken around their mean; else as they come.
        kbar, vbar: (B, Hkv, D), means in place of those computed here.

        Raises ValueError where key lengths cut into the grid of the order.
        """
        batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
        if order is None:
            starts = torch.arange(0, q.shape[2], QUERY_BLOCK, device=q.device)
            query_counts = (q.shape[2] - starts).clamp(max=QUERY_BLOCK)
            key_counts = count_keys(k.shape[2], key_lengths, batch, k.device)
        else:
            assert q.shape[2] == k.shape[2] == order.tokens
            _check(order, key_lengths)
            order = order.on(q.device)
            query_counts, key_counts = order.query_counts(), order.key_counts(key_lengths, batch)
            if order_kind is None:
                order_kind = torch.zeros(heads, dtype=torch.int64, device=q.device)
            order_kind = order_kind.to(q.device).long()[:: heads // kv_heads]
            order_kind = order_kind.clamp(0, order.order_kinds - 1)
        lengths = key_counts.sum(-1)
        q, k, v = (x.bfloat16() if x.dtype == torch.float32 else x for x in (q, k, v))
        if not smooth_k:
            kbar = k.new_zeros(batch, kv_heads, k.shape[-1], dtype=torch.float32)
        k, kbar, finite_keys = _centred(k, lengths, kbar)
        v, vbar, finite_values = _centred(v, lengths, vbar)
        return cls(
            order=order,
            order_kind=order_kind,
            q=_by_block(q.float(), QUERY_BLOCK, order, order_kind),
            k=_by_block(k, KEY_BLOCK, order, order_kind),
            v=_by_block(v, KEY_BLOCK, order, order_kind),
            kbar=kbar,
            vbar=vbar,
            finite=finite_keys & finite_values,
            query_counts=query_counts,
            key_counts=key_counts,
        )

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def n_queries(self) -> int:
        return int(self.query_counts.sum())

    @property
    def occupied(self) -> Tensor:
        """(nq, 128) bool: whether the row is a query."""
        if self.order is None:
            places = torch.arange(QUERY_BLOCK, device=self.q.device)
            return places < self.query_counts.unsqueeze(-1)
        slots = self.order.slot_token != EMPTY
        return pad(slots, (0, -len(slots) % QUERY_BLOCK)).unflatten(0, (-1, QUERY_BLOCK))

    def by_token(self, rows: Tensor) -> Tensor:
        """(B, H, slots, ...) as the queries came: (B, H, Nq, ...); there may be more rows."""
        if self.order is None:
            return rows[:, :, : self.n_queries]
        return _in_order(rows, self.order.token_slots, self.order_kind)

    @cached_property
    def q_block_mean(self) -> Tensor:
        """(B, H, nq, D)"""
        return block_means(self.q, self.query_counts)

    @cached_property
    def k_block_mean(self) -> Tensor:
        """(B, Hkv, nk, D), around kbar."""
        return block_means(self.k, self.key_counts[:, None])

    @cached_property
    def v_block_mean(self) -> Tensor:
        """(B, Hkv, nk, D), around vbar."""
        return block_means(self.v, self.key_counts[:, None])

    @cached_property
    def k_variance(self) -> Tensor:
        """(B, Hkv, nk, D), around the block's own mean and divided by the count."""
        return _variance(self.k, self.key_counts[:, None])

    @cached_property
    def v_variance(self) -> Tensor:
        """(B, Hkv, nk), summed over channels."""
        return _variance(self.v, self.key_counts[:, None]).sum(-1)

    @cached_property
    def q_self_similarity(self) -> Tensor:
        """(B, H, nq)"""
        return _self_similarity(self.q, self.query_counts)

    @cached_property
    def k_self_similarity(self) -> Tensor:
        """(B, Hkv, nk), around kbar."""
        return _self_similarity(self.k, self.key_counts[:, None])


def per_head(value: PerHead, heads: int, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=device).expand(heads)


def by_query_head(of_keys: Tensor, heads: int) -> Tensor:
    """Repeats (B, Hkv, ...) to (B, heads, ...)."""
    return of_keys.repeat_interleave(heads // of_keys.shape[1], 1)


def in_blocks(rows: Tensor, size: int) -> Tensor:
    """(..., N, D) to (..., ceil(N / size), size, D), zero-padded."""
    return pad(rows, (0, 0, 0, -rows.shape[-2] % size)).unflatten(-2, (-1, size))


def block_means(blocks: Tensor, counts: Tensor) -> Tensor:
    """Means (..., D) of the first `counts` (...) rows of blocks (..., size, D), the rest zero."""
    return blocks.sum(-2) / counts.clamp(min=1).unsqueeze(-1)


def _self_similarity(blocks: Tensor, counts: Tensor) -> Tensor:
    """(...) of blocks (..., size, D): |sum of unit rows|^2 / rows^2.

    It is 1 when all rows point one way, 0 when they cancel. A zero row has no direction and adds
    nothing. Rows that are not finite make it NaN.
    """
    length = blocks.norm(dim=-1, keepdim=True)
    unit = blocks / length.masked_fill_(length == 0, 1)
    return block_means(unit, counts).square().sum(-1)


def _variance(blocks: Tensor, counts: Tensor) -> Tensor:
    """(..., D) of blocks (..., size, D), whose first `counts` (...) rows are valid."""
    inside = torch.arange(blocks.shape[-2], device=blocks.device) < counts.unsqueeze(-1)
    deviation = blocks - block_means(blocks, counts).unsqueeze(-2)
    return block_means(deviation.masked_fill(~inside.unsqueeze(-1), 0).square(), counts)


def _centred(rows: Tensor, lengths: Tensor, mean: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (B, H, N, D) less their mean, or the given one: float32, 0 from `lengths` (B,) on. Also
    the mean (B, H, D), and whether all valid rows of a head are finite."""
    valid = torch.arange(rows.shape[2], device=rows.device) < lengths.unsqueeze(-1)
    beyond = ~valid[:, None, :, None]
    rows = rows.float().masked_fill(beyond, 0)
    total = (rows * SUM_UNIT).sum(2)
    if mean is None:
        mean = total / lengths.clamp(min=1)[:, None, None] / SUM_UNIT
    centred = (rows - mean.unsqueeze(2)).masked_fill_(beyond, 0)
    return centred, mean, total.isfinite().all(-1)


def _by_block(
    rows: Tensor, size: int, order: TokenOrder | None, order_kind: Tensor | None
) -> Tensor:
    """(B, H, N, D) in the token order of each head: (B, H, blocks, size, D)."""
    if order is not None:
        rows = _in_order(rows, order.slot_tokens.clamp(min=0), order_kind)
        rows = rows.masked_fill_((order.slot_token == EMPTY).unsqueeze(-1), 0)
    return in_blocks(rows, size)


def _in_order(rows: Tensor, order_places: Tensor, order_kind: Tensor | None) -> Tensor:
    """(B, H, places, ...): rows (B, H, N, ...) at the places (orders, places) of the token order of
    each KV head."""
    heads, places = rows.shape[1], order_places.long()[order_kind]
    places = places.repeat_interleave(heads // len(places), 0)
    return rows[:, torch.arange(heads, device=rows.device).unsqueeze(-1), places]


def _check(order: TokenOrder, key_lengths: Tensor | None) -> None:
    least = order.least_keys
    if key_lengths is not None and least is not None and int(key_lengths.min()) < least:
        raise ValueError(
            f"key_lengths go down to {int(key_lengths.min())}; they may cut the tokens after the "
            f"grid only, so give at least {least}."
        )
