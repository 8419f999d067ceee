# SPDX-License-Identifier: Apache-2.0
"""All stages together; an order and head settings are optional."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..head_settings import HeadSettings
from ..order.grid import TokenOrder
from ..policy import Precision, SparsePolicy
from .attend import Attended, attend
from .operands import Operands
from .route import Route, route


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy,
    head_settings: HeadSettings | None = None,
    *,
    order: TokenOrder | None = None,
    is_causal: bool = False,
    scale: float,
    key_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
) -> tuple[Attended, Route]:
    """Sparse attention of q (B, H, Nq, D) over k, v (B, Hkv, Nk, D), and what became of the blocks
    (in the token order of each head).

    Of the policy's precision nothing is left but whether self-similarity is that of centred keys.
    """
    assert order is None or not is_causal
    order_kind = None if head_settings is None else head_settings.order_kind
    smooth_k = policy.smooth_k and policy.precision is not Precision.SIXTEEN_BIT
    x = Operands.of(q, k, v, order, order_kind, smooth_k=smooth_k, key_lengths=key_lengths)
    rules: dict[str, Any] = {"scale": scale, "is_causal": is_causal}
    routed = route(x, policy, head_settings, block_mask=block_mask, **rules)
    rules["pvthreshd"] = policy.pvthreshd
    if head_settings is None:
        return attend(x, routed.kept, **rules), routed
    pooled = routed.pooled if head_settings.pools else None
    if head_settings.output_scale is not None:
        rules["output_scale"] = head_settings.output_scale
    return attend(x, routed.kept, pooled, head_settings.pool_weight, **rules), routed
