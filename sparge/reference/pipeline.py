# SPDX-License-Identifier: Apache-2.0
"""All stages together; an order and head settings are optional."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..head_settings import HeadSettings
from ..kernels.spec import Element
from ..order.grid import TokenOrder
from ..policy import Precision, SparsePolicy, operand_dtype
from .attend import Attended, attend
from .quantize import quantize_qkv
from .quantized import Quantized, scatter
from .route import Route, route

OfHeads = TypeVar("OfHeads", Attended, Route)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy,
    head_settings: HeadSettings | None = None,
    *,
    order: TokenOrder | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
    element: Element | None = None,
) -> tuple[Attended, Route]:
    """Sparse attention of q (B, H, Nq, D) over k, v (B, Hkv, Nk, D), rows in the caller's order,
    and what became of the blocks (in the token order of each head)."""
    assert order is None or not is_causal
    if order is not None and head_settings is not None and head_settings.order_kind is not None:
        options = {"scale": scale, "key_lengths": key_lengths, "element": element}
        alike = replace(head_settings, order_kind=None)
        by_order = [
            attention(q, k, v, policy, alike, order=order.of_kind(kind), **options)
            for kind in range(order.order_kinds)
        ]
        attended, routes = zip(*by_order, strict=True)
        group = q.shape[1] // k.shape[1]
        taken = head_settings.order_kind.to(q.device).long()[::group].repeat_interleave(group)
        return _by_head(attended, taken), _by_head(routes, taken)
    x = _quantize(q, k, v, policy, order, key_lengths, element)
    shared: dict[str, Any] = {
        "scale": x.head_dim**-0.5 if scale is None else scale,
        "is_causal": is_causal,
    }
    routed = route(x, policy, head_settings, block_mask=block_mask, **shared)
    pool_weight = output_scale = 1.0
    if head_settings is not None:
        pool_weight = head_settings.pool_weight
        if head_settings.output_scale is not None:
            output_scale = head_settings.output_scale
    attended = attend(
        x,
        routed.kept,
        routed.pooled,
        pool_weight,
        output_scale=output_scale,
        pvthreshd=policy.pvthreshd,
        **shared,
    )
    by_row = ("out", "lse", "row_max", "row_sum", "unnormalised")
    rows = {name: scatter(getattr(attended, name), x.order) for name in by_row}
    return replace(attended, **rows), routed


def _quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy,
    order: TokenOrder | None,
    key_lengths: Tensor | None,
    element: Element | None,
) -> Quantized:
    if element is None:  # no GPU names one
        element = Element.INT8_FP16
        if policy.precision is Precision.SIXTEEN_BIT:
            in_half = operand_dtype(q.dtype, k.dtype, v.dtype) == torch.float16
            element = Element.FP16 if in_half else Element.BF16
    smooth_k = policy.smooth_k
    return quantize_qkv(q, k, v, order, element=element, smooth_k=smooth_k, key_lengths=key_lengths)


def _by_head(by_order: Sequence[OfHeads], order_kind: Tensor) -> OfHeads:
    """Selects for each head what its token order gave, the last one for a number beyond; all fields
    are (B, H, ...)."""
    order_kind = order_kind.clamp(0, len(by_order) - 1)
    heads = torch.arange(len(order_kind), device=order_kind.device)

    def joined(name: str) -> Tensor:
        return torch.stack([getattr(part, name) for part in by_order], 1)[:, order_kind, heads]

    return replace(by_order[0], **{each.name: joined(each.name) for each in fields(by_order[0])})
