# SPDX-License-Identifier: Apache-2.0
"""Operands as the attend kernels read them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from sparge.blocks import KEY_BLOCK
from sparge.kernels.spec import Element
from sparge.order.grid import TokenOrder
from sparge.reference import Operands
from sparge.reference.operands import by_query_head
from sparge.stages.key_mean import mean_stride

from . import balance
from .arithmetic import ARITHMETIC, E4M3_MAX, INT8_MAX, Arithmetic

# Scale of a row or block of zeros, and the least scale of any. Levels of zeros are 0 whatever the
# scale; a scale of 1 would make one level worth more than all real logits, and with it the rounding
# of a kernel's score offset.
ZERO_SCALE = 2.0**-80
# Least scale of a channel of values: its reciprocal is finite.
LEAST_CHANNEL_SCALE = 2.0**-126


@dataclass(frozen=True, eq=False)
class Quantized(Operands):
    """Levels times scales give the stored value of each row, by slot where there is an order: of Q
    as it is, of K and V around their means. Without quantization the levels are bf16 or fp16
    values, all scales are 1 and both means are 0. INT8 levels of Q and K are of balanced and
    rotated channels (`balance`), filled up to a multiple of eight.
    """

    element: Element
    extent: Tensor  # (B, Hkv, D), largest magnitude of each channel of k
    q_levels: Tensor  # (B, H, Nq, D) int8, or bf16 / fp16
    k_levels: Tensor  # (B, Hkv, Nk, D) int8, or bf16 / fp16
    v_levels: Tensor  # (B, Hkv, Nk, D) fp16, e4m3, int8 or bf16
    q_scale: Tensor  # (B, H, Nq)
    k_scale: Tensor  # (B, Hkv, nk)
    v_scale: Tensor  # (B, Hkv, D)
    v_block_scale: Tensor  # (B, Hkv, nk), factors on v_scale: 1 where values are no integers

    @cached_property
    def k_variance(self) -> Tensor:
        """Kept in bf16 between quantize and route (docs/experiments.md, Precision of block
        statistics), as is `v_block_mean`."""
        return super().k_variance.bfloat16().float()

    @cached_property
    def v_block_mean(self) -> Tensor:
        return super().v_block_mean.bfloat16().float()


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: TokenOrder | None = None,
    order_kind: Tensor | None = None,
    *,
    element: Element = Element.INT8_FP16,
    smooth_k: bool = True,
    key_lengths: Tensor | None = None,
    kbar: Tensor | None = None,
    vbar: Tensor | None = None,
    v_scale: Tensor | None = None,
    extent: Tensor | None = None,
) -> Quantized:
    """Quantizes q (B, H, Nq, D), k and v (B, Hkv, Nk, D) for `element`; the rest as in
    `Operands.of`.

    `kbar`, `vbar`, `v_scale`, `extent` (B, Hkv, D) float32 replace the means, scales and extents of
    keys computed here: block statistics are not shift-invariant, so a kernel is judged on the means
    it took itself. In an order of many tokens mean and extent of keys are of a sample
    (`mean_stride`).
    """
    arithmetic = ARITHMETIC[element]
    stride = mean_stride(k.shape[2], order is not None)
    if not arithmetic.quantized_qk:
        kbar = vbar = k.new_zeros(*k.shape[:2], k.shape[3], dtype=torch.float32)
    elif kbar is None and smooth_k:
        kbar = sampled_mean(k, key_lengths, stride) if stride > 1 else None
    given = {"smooth_k": smooth_k, "key_lengths": key_lengths, "kbar": kbar, "vbar": vbar}
    x = Operands.of(q, k, v, order, order_kind, **given)
    queries, keys = q.shape[2], k.shape[2]
    if order is not None:
        queries = keys = order.slots

    if v_scale is None:
        v_scale = torch.ones_like(x.vbar)
        if arithmetic.quantized_qk:
            largest = x.v.abs().amax((2, 3))
            scale = (largest / E4M3_MAX).clamp(min=LEAST_CHANNEL_SCALE)
            v_scale = torch.where(largest > 0, scale, 1.0)
    scaled = x.v / v_scale[:, :, None, None]
    v_levels, v_block_scale = arithmetic.round(scaled), torch.ones_like(scaled[..., 0, 0])
    if arithmetic.integer_pv:
        v_levels, v_block_scale = stored(scaled, arithmetic)
    if extent is None:
        extent = sampled_extent(k, key_lengths, stride, x.kbar)
    q_rows, k_rows = x.q, x.k
    if arithmetic.quantized_qk:
        factors = balance.balance(extent)
        of_heads = by_query_head(factors, x.heads)
        q_rows = balance.of_queries(x.q, of_heads[:, :, None, None])
        k_rows = balance.of_keys(x.k, factors[:, :, None, None])
    q_levels, q_scale = stored(q_rows.flatten(2, 3)[:, :, :queries].unsqueeze(-2), arithmetic)
    k_levels, k_scale = stored(k_rows, arithmetic)
    return Quantized(
        **{field.name: getattr(x, field.name) for field in fields(x)},
        element=element,
        extent=extent,
        q_levels=q_levels.squeeze(-2),
        k_levels=k_levels.flatten(2, 3)[:, :, :keys],
        v_levels=v_levels.flatten(2, 3)[:, :, :keys],
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        v_block_scale=v_block_scale,
    )


def stored(groups: Tensor, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Levels (..., rows, D) of `groups`, and the scale (...) that the rows of each share: NaN where
    they are not finite. INT8 levels are -127..127, and 0 where the scale is NaN."""
    if not arithmetic.quantized_qk:
        return arithmetic.round(groups), torch.ones_like(groups[..., 0, 0])
    largest = groups.abs().amax((-2, -1))
    counts = largest > ZERO_SCALE * INT8_MAX  # more than zeros
    scale = torch.where(counts, largest / INT8_MAX, ZERO_SCALE)
    # Multiplying by 127 / largest settles exact halves: bf16 is full of them. A true division:
    # Python's `127 / tensor` multiplies by a rounded reciprocal.
    inverse = torch.full_like(largest, INT8_MAX).div(largest)
    levels = (groups * torch.where(counts, inverse, 1.0)[..., None, None]).round()
    levels = levels.nan_to_num(0, 0, 0).to(torch.int8)
    return levels, torch.where(largest.isfinite(), scale, torch.nan)


def sampled_mean(k: Tensor, key_lengths: Tensor | None, stride: int) -> Tensor:
    """(B, Hkv, D) float32: mean of k (B, Hkv, N, D), as 16-bit values; stride as `mean_stride`."""
    keys, counts = _sample(k, key_lengths, stride)
    counted = counts.sum(2).clamp(min=1)
    return (torch.where(counts, keys.double(), 0).sum(2) / counted).float()


def sampled_extent(k: Tensor, key_lengths: Tensor | None, stride: int, kbar: Tensor) -> Tensor:
    """(B, Hkv, D) float32: largest |k - kbar| of such a sample."""
    keys, counts = _sample(k, key_lengths, stride)
    away = (keys.float() - kbar.unsqueeze(2)).abs()
    return torch.where(counts, away, 0).amax(2)


def _sample(k: Tensor, key_lengths: Tensor | None, stride: int) -> tuple[Tensor, Tensor]:
    """Keys (B, Hkv, N, D) as 16-bit values, and which of them count (B, 1, N, 1)."""
    keys = k.bfloat16() if k.dtype == torch.float32 else k
    token = torch.arange(k.shape[2], device=k.device)
    counts = (token // KEY_BLOCK % stride == 0).expand(k.shape[0], -1)
    if key_lengths is not None:
        counts = counts & (token < key_lengths.to(k.device).unsqueeze(-1))
    return keys, counts[:, None, :, None]
