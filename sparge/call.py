# SPDX-License-Identifier: Apache-2.0
"""Validated attention call, as stages take it, and the same call for some of its heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .checks.argument import check_kind, flag
from .checks.validate import (
    Alignment,
    as_heads_first,
    check_block_mask,
    check_bottom_right,
    check_inference,
    check_key_lengths,
    check_pair,
    check_values,
    checked_scale,
    ends_with_the_keys,
)
from .errors import Unsupported
from .head_settings import HeadSettings
from .kernels import Element, capabilities, native_element
from .order.grid import TokenOrder
from .policy import Precision, SparsePolicy, operand_dtype
from .stages.workspace import CallShape


@dataclass(frozen=True, eq=False)
class CheckedCall:
    """One call: q (B, H, Nq, D), k and v (B, Hkv, Nk, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    policy: SparsePolicy
    scale: float
    is_causal: bool
    key_lengths: Tensor | None
    block_mask: Tensor | None
    order: TokenOrder | None
    head_settings: HeadSettings | None
    thresholds: Tensor | None
    bottom_right: bool = False
    """Meaning of `is_causal`: True when the last query sees the last key, else the first sees the
    first."""

    @property
    def shape(self) -> CallShape:
        return CallShape.of(self.q, self.k, None if self.order is None else self.order.slots)

    @property
    def pools(self) -> bool:
        """Whether dropped blocks may take part as their means."""
        return self.head_settings is not None and self.head_settings.pools

    @property
    def element(self) -> Element:
        return element_of(self.policy.precision, self.q, self.k, self.v)

    @property
    def routes(self) -> bool:
        """Whether there is room for query statistics, which a given mask replaces."""
        return self.block_mask is None

    @property
    def scores(self) -> bool:
        """Whether route asks what blocks are like."""
        return self.routes and not self._keeps_all

    @property
    def _keeps_all(self) -> bool:
        """Whether top-k keeps all blocks, as far as the host knows, which does not read thresholds
        of heads."""
        policy = self.policy
        return (
            self.thresholds is None
            and policy.select_by == "topk"
            and not isinstance(policy.topk, Tensor)
            and policy.topk >= 1
        )

    @property
    def is_whole(self) -> bool:
        """Whether all queries attend to all keys: a map of such a call needs no route."""
        plain = self.order is None and self.key_lengths is None and not self.is_causal
        return self.routes and self._keeps_all and plain

    @property
    def asks_similarity(self) -> bool:
        """Whether some block may fail the gate of self-similarity, which is never below 0."""
        threshold = self.policy.simthreshd1
        return self.scores and (isinstance(threshold, Tensor) or float(threshold) >= 0)

    def heads(self, first: int, last: int) -> CheckedCall:
        """Part of the call with the KV heads first .. last - 1 and the query heads that read
        them.
        """
        group = self.shape.heads // self.shape.kv_heads
        kv, query = slice(first, last), slice(first * group, last * group)
        return replace(
            self,
            q=self.q[:, query],
            k=self.k[:, kv],
            v=self.v[:, kv],
            block_mask=None if self.block_mask is None else self.block_mask[:, query],
            head_settings=None
            if self.head_settings is None
            else self.head_settings.heads_slice(query),
            thresholds=None if self.thresholds is None else self.thresholds[query],
        )


def element_of(precision: Precision, q: Tensor, *others: Tensor) -> Element:
    """Operand types that ``precision`` means on q's device, for k and v of these dtypes."""
    if precision is Precision.INT8_FP16:
        return Element.INT8_FP16
    arch = capabilities(q.device).arch
    dtype = operand_dtype(*(tensor.dtype for tensor in (q, *others)))
    return native_element(arch, precision is Precision.SIXTEEN_BIT, dtype)


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy | None,
    layout: str,
    is_causal: bool,
    scale: float | None,
    key_lengths: Tensor | None,
    block_mask: Tensor | None,
    order: TokenOrder | None = None,
    head_settings: HeadSettings | None = None,
    causal: Alignment | None = None,
) -> CheckedCall:
    """Validates arguments. Raises Unsupported or ValueError, with a sentence for the user, before
    anything runs."""
    policy = SparsePolicy() if policy is None else policy
    _check_kinds(policy, order, head_settings)
    q, k = as_heads_first("q", q, layout), as_heads_first("k", k, layout)
    check_pair(q, k)
    v = as_heads_first("v", v, layout)
    check_values(k, v)
    check_pair(q, v, "v")
    check_key_lengths(key_lengths, q)
    check_block_mask(block_mask, q, k)
    optional = (
        block_mask,
        *policy.per_head.values(),
        *(head_settings.tensors.values() if head_settings else ()),
    )
    check_inference(q, k, v, *(tensor for tensor in optional if tensor is not None))
    is_causal = flag("is_causal", is_causal)
    n_queries, n_keys = q.shape[2], k.shape[2]
    bottom_right = False
    if is_causal or causal is not None:
        bottom_right = ends_with_the_keys(is_causal, causal, n_queries, n_keys)
        is_causal = True
    _check_order_and_settings(q, k, policy, is_causal, block_mask, order, head_settings)
    if order is not None and key_lengths is not None and not order.segments:
        raise Unsupported(
            "key_lengths and an order that was taken from another sequence do not go together: "
            "what they cut off stands in several places. Leave one of them out."
        )
    softmax_scale = checked_scale(scale, q.shape[-1])
    if bottom_right:
        check_bottom_right(n_queries, n_keys, key_lengths, block_mask)
    if block_mask is not None and block_mask.dtype not in (torch.bool, torch.uint8, torch.int8):
        block_mask = block_mask != 0
    heads = q.shape[1]
    return CheckedCall(
        q,
        k,
        v,
        policy,
        softmax_scale,
        is_causal,
        key_lengths,
        block_mask,
        None if order is None else order.on(q.device),
        head_settings,
        policy.head_thresholds(heads, q.device)
        if head_settings is None
        else head_settings.table(policy),
        bottom_right and n_queries != n_keys,
    )


def _check_kinds(
    policy: SparsePolicy, order: TokenOrder | None, head_settings: HeadSettings | None
) -> None:
    check_kind("policy", policy, SparsePolicy, "a SparsePolicy, say SparsePolicy(topk=0.3)")
    for name, value, kind, maker in (
        ("order", order, TokenOrder, "cube_order or grid_order"),
        ("head_settings", head_settings, HeadSettings, "HeadSettings or HeadSettings.uniform"),
    ):
        if value is not None:
            check_kind(name, value, kind, f"what {maker} makes")


def _check_order_and_settings(
    q: Tensor,
    k: Tensor,
    policy: SparsePolicy,
    is_causal: bool,
    block_mask: Tensor | None,
    order: TokenOrder | None,
    head_settings: HeadSettings | None,
) -> None:
    if (order is not None or head_settings is not None) and block_mask is not None:
        raise ValueError(
            "block_mask replaces routing, which order and head_settings are about: give one or the "
            "other."
        )
    if order is not None:
        if is_causal:
            raise Unsupported(
                "A token order and is_causal do not go together: blocks of an order hold tokens "
                "from before and after. Leave one of them out."
            )
        if q.shape[2] != order.tokens or k.shape[2] != order.tokens:
            raise Unsupported(
                f"The call has {q.shape[2]} queries and {k.shape[2]} keys; the token order is one "
                f"of {order.tokens} tokens that attend to each other. Make an order for this grid."
            )
    if head_settings is not None and head_settings.order_kind is not None and order is None:
        raise ValueError(
            "The head settings say which token order each head takes, and no order is given: "
            "give order=grid_order(grid), or head settings without order_kind."
        )
    if head_settings is not None:
        _check_output_scale(policy, head_settings, is_causal)
    if head_settings is not None and (
        head_settings.heads != q.shape[1] or head_settings.device != q.device
    ):
        raise ValueError(
            f"The head settings are for {head_settings.heads} heads on {head_settings.device}, q "
            f"has {q.shape[1]} heads on {q.device}: give one value for each head, on q's device."
        )


def _check_output_scale(policy: SparsePolicy, head_settings: HeadSettings, is_causal: bool) -> None:
    if head_settings.output_scale is None:
        return
    if is_causal:
        reason = "its mean value would tell causal attention of later keys"
    elif policy.precision is Precision.SIXTEEN_BIT:
        reason = "16-bit operands do not know it, as they are not taken around a mean"
    else:
        return
    raise Unsupported(f"The head settings have an output_scale, but {reason}: leave it out.")
