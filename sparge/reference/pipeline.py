# SPDX-License-Identifier: Apache-2.0
"""All stages together."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import BlockPlan
from ..kernels.spec import Element
from ..policy import PV_FILTER_OFF, Precision, SparsePolicy, operand_dtype
from .attend import Attended, attend
from .quantize import Quantized, quantize_qkv
from .route import route


def reference_element(precision: Precision, *dtypes: torch.dtype) -> Element:
    """The element the reference emulates for q, k and v of `dtypes`, where no GPU names one."""
    if precision is not Precision.SIXTEEN_BIT:
        return Element.INT8_FP16
    return Element.FP16 if operand_dtype(*dtypes) == torch.float16 else Element.BF16


def make_plan(
    q: Tensor,
    k: Tensor,
    policy: SparsePolicy,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
    element: Element | None = None,
) -> BlockPlan:
    """The blocks `policy` keeps for q (B, H, Nq, D) and k (B, Hkv, Nk, D)."""
    quantized = _quantize(q, k, k, policy, key_lengths, element)
    return route(
        quantized, policy, scale=softmax_scale(q, scale), is_causal=is_causal, block_mask=block_mask
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
    plan: BlockPlan | None = None,
    element: Element | None = None,
) -> tuple[Attended, BlockPlan]:
    """Sparse attention of q (B, H, Nq, D) over k, v (B, Hkv, Nk, D), and the plan that was used.

    A given `plan` replaces routing; its `is_causal` counts then.
    """
    quantized = _quantize(q, k, v, policy, key_lengths, element)
    if plan is None:
        plan = route(
            quantized,
            policy,
            scale=softmax_scale(q, scale),
            is_causal=is_causal,
            block_mask=block_mask,
        )
    pvthreshd = policy.pvthreshd if policy.pv_filter else PV_FILTER_OFF
    return attend(quantized, plan, scale=softmax_scale(q, scale), pvthreshd=pvthreshd), plan


def _quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy,
    key_lengths: Tensor | None,
    element: Element | None,
) -> Quantized:
    if element is None:
        element = reference_element(policy.precision, q.dtype, k.dtype, v.dtype)
    return quantize_qkv(
        q,
        k,
        v,
        element=element,
        smooth_k=policy.smooth_k,
        key_lengths=key_lengths,
    )


def softmax_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale
