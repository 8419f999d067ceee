# SPDX-License-Identifier: Apache-2.0
"""Stages means and quantize over a token order: operands by slot, and statistics of blocks.

Within a segment of an order only the end is ragged, so each segment is quantized like a sequence of
its own, around the means and value scales of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import KEY_BLOCK
from ..errors import Unsupported
from ..kernels.spec import Element
from ..order.grid import EMPTY, Segment, TokenOrder
from ..stages.key_mean import mean_stride
from .arithmetic import ARITHMETIC
from .quantize import Quantized, count_rows, quantize_qkv


@dataclass(frozen=True, eq=False)
class Packed:
    """Quantized operands and block statistics; Nq and Nk count slots where there is an order.

    Statistics are float32, over the valid keys of each block, 0 for a block without any. Variances
    are around the block's own mean and divided by the count.
    """

    operands: Quantized
    order: TokenOrder | None
    query_counts: Tensor  # (nq,) queries of each query block
    k_variance: Tensor  # (B, Hkv, nk, D)
    v_block_mean: Tensor  # (B, Hkv, nk, D), of V - vbar
    v_variance: Tensor  # (B, Hkv, nk), summed over channels

    @property
    def occupied(self) -> Tensor:
        """(Nq,) bool: whether the row is a query and not an empty slot."""
        if self.order is not None:
            return self.order.slot_token != EMPTY
        return torch.ones(
            self.operands.n_queries, dtype=torch.bool, device=self.query_counts.device
        )


def pack_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: TokenOrder | None = None,
    *,
    element: Element = Element.INT8_FP16,
    smooth_k: bool = True,
    key_lengths: Tensor | None = None,
    kbar: Tensor | None = None,
    vbar: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Packed:
    """Quantize q (B, H, Nq, D), k and v (B, Hkv, Nk, D) in `order`, or as they come without one.

    Given means and value scales (B, Hkv, D) replace those of the keys. In an order of many tokens
    the mean key is that of a sample (`mean_stride`).

    Raises:
        Unsupported: the tensors are not one sequence of the order's tokens.
        ValueError: key lengths cut into the grid.
    """
    stride = mean_stride(k.shape[2], order is not None)
    if stride > 1 and kbar is None and smooth_k and ARITHMETIC[element].quantized_qk:
        kbar = sampled_mean(k, key_lengths, stride)
    plain = quantize_qkv(
        q,
        k,
        v,
        element=element,
        smooth_k=smooth_k,
        key_lengths=key_lengths,
        kbar=kbar,
        vbar=vbar,
        v_scale=v_scale,
    )
    if order is None:
        operands, query_counts = plain, count_rows(q.shape[2], q.device)
        slots = torch.arange(k.shape[2], device=k.device)
        valid = slots < operands.key_counts.sum(-1, keepdim=True)
    else:
        _check(order, q, k, key_lengths)
        order = order.on(q.device)
        operands, query_counts = _by_segment(plain, q, k, v, order), order.query_counts()
        valid = order.valid_slots(key_lengths, q.shape[0])
        k, v = gather(k, order), gather(v, order)
    counts = operands.key_counts
    v_mean, v_variance = _moments(v, operands.vbar, valid, counts)
    _, k_variance = _moments(k, operands.kbar, valid, counts)
    return Packed(operands, order, query_counts, k_variance, v_mean, v_variance.sum(-1))


def sampled_mean(k: Tensor, key_lengths: Tensor | None, stride: int) -> Tensor:
    """(B, Hkv, D) float32: mean of k (B, Hkv, N, D), as 16-bit values; stride as `mean_stride`."""
    keys = k.bfloat16() if k.dtype == torch.float32 else k
    token = torch.arange(k.shape[2], device=k.device)
    counts = (token // KEY_BLOCK % stride == 0).expand(k.shape[0], -1)
    if key_lengths is not None:
        counts = counts & (token < key_lengths.to(k.device).unsqueeze(-1))
    counted = counts.sum(-1).clamp(min=1)[:, None, None]
    kept = torch.where(counts[:, None, :, None], keys.double(), 0)
    return (kept.sum(2) / counted).float()


def gather(rows: Tensor, order: TokenOrder) -> Tensor:
    """(B, H, tokens, D) to (B, H, slots, D), zeros in the empty slots."""
    packed = rows[:, :, order.slot_token.clamp(min=0).long()]
    return packed.masked_fill((order.slot_token == EMPTY).unsqueeze(-1), 0)


def scatter(packed: Tensor, order: TokenOrder) -> Tensor:
    """(B, H, slots, ...) to (B, H, tokens, ...)."""
    return packed[:, :, order.token_slot.long()]


def _by_segment(plain: Quantized, q: Tensor, k: Tensor, v: Tensor, order: TokenOrder) -> Quantized:
    one = slice(0, 1)  # the half of the operands that a call below has no use for
    of_queries = quantize_qkv(
        gather(q, order), k[:, :, one], v[:, :, one], element=plain.element, kbar=plain.kbar
    )
    parts = [_segment_keys(plain, q[:, :, one], k, v, order, part) for part in order.segments]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], 2)

    def by_slot(name: str) -> Tensor:
        levels = [getattr(part, name) for part in parts]
        return torch.cat([pad(x, (0, 0, 0, -x.shape[2] % KEY_BLOCK)) for x in levels], 2)

    # Statistics above divided by the slots of a query block, of which some are empty.
    rows = count_rows(order.slots, q.device).float() / order.query_counts()
    return replace(
        of_queries,
        q_block_mean=of_queries.q_block_mean * rows.unsqueeze(-1),
        q_self_similarity=of_queries.q_self_similarity * rows.square(),
        k_levels=by_slot("k_levels"),
        v_levels=by_slot("v_levels"),
        k_scale=joined("k_scale"),
        v_scale=plain.v_scale,
        vbar=plain.vbar,
        k_block_mean=joined("k_block_mean"),
        k_self_similarity=joined("k_self_similarity"),
        key_counts=order.key_counts(plain.key_lengths, plain.batch),
        key_lengths=plain.key_lengths,
        finite=plain.finite,
    )


def _segment_keys(
    plain: Quantized, q: Tensor, k: Tensor, v: Tensor, order: TokenOrder, segment: Segment
) -> Quantized:
    first = segment.first_block * KEY_BLOCK
    tokens = order.slot_token[first : first + segment.tokens].long()
    lengths = plain.key_lengths
    if lengths is not None:
        lengths = (lengths - segment.first_token).clamp(0, segment.tokens)
    return quantize_qkv(
        q,
        k[:, :, tokens],
        v[:, :, tokens],
        element=plain.element,
        key_lengths=lengths,
        kbar=plain.kbar,
        vbar=plain.vbar,
        v_scale=plain.v_scale,
    )


def _moments(rows: Tensor, centre: Tensor, valid: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (B, Hkv, nk, D) of each block of rows - centre; valid (B, N) bool."""
    rows = rows.bfloat16() if rows.dtype == torch.float32 else rows  # as quantize_qkv reads them
    centred = rows.float() - centre.unsqueeze(2)
    centred = centred.masked_fill(~valid[:, None, :, None], 0)
    n = counts.clamp(min=1)[:, None, :, None]
    blocks = pad(centred, (0, 0, 0, -rows.shape[2] % KEY_BLOCK)).unflatten(2, (-1, KEY_BLOCK))
    mean = blocks.sum(3) / n
    inside = pad(valid, (0, -valid.shape[1] % KEY_BLOCK)).unflatten(1, (-1, KEY_BLOCK))
    deviation = (blocks - mean.unsqueeze(3)).masked_fill(~inside[:, None, :, :, None], 0)
    return mean, deviation.square().sum(3) / n


def _check(order: TokenOrder, q: Tensor, k: Tensor, key_lengths: Tensor | None) -> None:
    if q.shape[2] != order.tokens or k.shape[2] != order.tokens:
        raise Unsupported(
            f"The call has {q.shape[2]} queries and {k.shape[2]} keys; the token order is one of "
            f"{order.tokens} tokens that attend to each other. Make an order for this grid."
        )
    if key_lengths is None:
        return
    last = order.segments[-1]
    least = last.first_token if last.queries_exact and len(order.segments) > 1 else order.tokens
    if int(key_lengths.min()) < least:
        raise ValueError(
            f"key_lengths go down to {int(key_lengths.min())}; they may cut the tokens after the "
            f"grid only, so give at least {least}."
        )
