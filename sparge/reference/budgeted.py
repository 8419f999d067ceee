# SPDX-License-Identifier: Apache-2.0
"""All stages together, in a token order and with head settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import Unsupported
from ..head_settings import HeadSettings
from ..kernels.spec import Element
from ..order.grid import TokenOrder
from ..policy import PV_FILTER_OFF, SparsePolicy
from .attend import Attended
from .choose import Choice, choose_blocks, poolable
from .packed import Packed, pack_qkv, scatter
from .partial import Partial
from .pipeline import reference_element, softmax_scale
from .pooled import attend_packed

OfHeads = TypeVar("OfHeads", Attended, Choice)


def budgeted_attention(
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
    element: Element | None = None,
) -> tuple[Attended, Choice]:
    """Sparse attention of q (B, H, Nq, D) over k, v (B, Hkv, Nk, D), rows in the caller's order,
    and the blocks (in the token order of each head) that it chose.

    Raises:
        Unsupported: causal attention in a token order, which has no past and future.
    """
    if order is not None and is_causal:
        raise Unsupported(
            "A token order and is_causal do not go together: blocks of an order hold tokens from "
            "before and after. Leave one of them out."
        )
    if order is not None and head_settings is not None and head_settings.order_kind is not None:
        group = q.shape[1] // k.shape[1]
        head_order_kind = (
            head_settings.order_kind.to(q.device).view(-1, group)[:, :1].expand(-1, group).flatten()
        )
        by_order = [
            budgeted_attention(
                q,
                k,
                v,
                policy,
                replace(head_settings, order_kind=None),
                order=order.of_kind(order_kind),
                scale=scale,
                key_lengths=key_lengths,
                element=element,
            )
            for order_kind in range(order.order_kinds)
        ]
        attended, choices = zip(*by_order, strict=True)
        return _by_head(attended, head_order_kind), _by_head(choices, head_order_kind)
    if element is None:
        element = reference_element(policy.precision, q.dtype, k.dtype, v.dtype)
    packed = pack_qkv(
        q,
        k,
        v,
        order,
        element=element,
        smooth_k=policy.smooth_k,
        key_lengths=key_lengths,
    )
    choice = choose_blocks(
        packed, policy, head_settings, scale=softmax_scale(q, scale), is_causal=is_causal
    )
    attended = attend_packed(
        packed,
        choice.kept,
        choice.pooled,
        1.0 if head_settings is None else head_settings.pool_weight,
        output_scale=1.0
        if head_settings is None or head_settings.output_scale is None
        else head_settings.output_scale,
        scale=softmax_scale(q, scale),
        is_causal=is_causal,
        pvthreshd=policy.pvthreshd if policy.pv_filter else PV_FILTER_OFF,
    )
    return _in_token_order(attended, order), choice


def bucket_partials(
    packed: Packed, buckets: Tensor, count: int, *, scale: float, is_causal: bool = False
) -> list[tuple[Partial, Partial]]:
    """Exact and pooled part of each bucket of blocks, 0 .. count - 1.

    `buckets` (B, H, nq, nk) int: the bucket of each block, any other number for none. With the
    first t buckets exact and pool weight g, the output is that of all exact parts before t together
    with all pooled parts from t on, `weighted(g)`. Rows are slots where `packed` has an order.
    """
    nothing = torch.zeros_like(buckets, dtype=torch.bool)
    parts: list[tuple[Partial, Partial]] = []
    for bucket in range(count):
        blocks = buckets == bucket
        exact = attend_packed(packed, blocks, scale=scale, is_causal=is_causal)
        whole = poolable(packed, blocks, is_causal)
        pooled = attend_packed(packed, nothing, whole, scale=scale)
        parts.append((_partial(exact), _partial(pooled)))
    return parts


def _by_head(by_order: Sequence[OfHeads], head_order_kind: Tensor) -> OfHeads:
    """Selects for each head what its token order gave, the last one for a number beyond; all fields
    are (B, H, ...)."""
    order_kind = head_order_kind.long().clamp(0, len(by_order) - 1)
    heads = torch.arange(len(order_kind), device=order_kind.device)

    def joined(name: str) -> Tensor:
        return torch.stack([getattr(part, name) for part in by_order], 1)[:, order_kind, heads]

    return replace(by_order[0], **{each.name: joined(each.name) for each in fields(by_order[0])})


def _partial(attended: Attended) -> Partial:
    return Partial(attended.unnormalised, attended.row_max, attended.row_sum)


def _in_token_order(attended: Attended, order: TokenOrder | None) -> Attended:
    if order is None:
        return attended
    order = order.on(attended.out.device)
    by_row = ("out", "lse", "row_max", "row_sum", "unnormalised")
    return replace(attended, **{name: scatter(getattr(attended, name), order) for name in by_row})
