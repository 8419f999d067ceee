# SPDX-License-Identifier: Apache-2.0
"""Checks of an attention call's arguments, each by itself and beside the others."""

from __future__ import annotations

from dataclasses import dataclass

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
    check_layout,
    check_output_dtype,
    check_pair,
    check_values,
    checked_scale,
    ends_with_the_keys,
)
from .errors import Unsupported
from .head_settings import HeadSettings
from .order.grid import TokenOrder
from .policy import Precision, SparsePolicy
from .stats import AttentionStats

MOVED = (
    "key_lengths of shape (B, 1) say that keys were moved to the front (KeyPadding.apply of a mask "
    "with padding in front or in between); causal attention and token orders go by where keys "
    "were: pad at the end, or call attention for each batch entry with its padding cut off."
)


@dataclass(frozen=True, eq=False)
class CheckedCall:
    """Call whose arguments fit together: q (B, H, Nq, D), k and v (B, Hkv, Nk, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    policy: SparsePolicy
    attention_sink: bool
    exact_prefix: int
    exact_suffix: int
    """Sink, prefix and suffix are the policy's; a part of a call has its share of the whole's."""
    scale: float
    causal: bool
    ends_with_keys: bool
    """Whether it is causal, with more keys than queries or fewer, and its last query sees the last
    key."""
    key_lengths: Tensor | None
    block_mask: Tensor | None
    order: TokenOrder | None
    head_settings: HeadSettings | None
    out_layout: str
    out_dtype: torch.dtype
    with_lse: bool


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy,
    *,
    layout: str,
    out_layout: str,
    is_causal: bool,
    causal: Alignment | None,
    scale: float | None,
    key_lengths: Tensor | None,
    block_mask: Tensor | None,
    order: TokenOrder | None,
    head_settings: HeadSettings | None,
    stats: AttentionStats | None,
    output_dtype: torch.dtype | None,
    return_lse: bool,
) -> CheckedCall:
    """Checks the arguments of `attention`. Raises Unsupported or ValueError, with a sentence for
    the user, before anything runs."""
    check_kind("policy", policy, SparsePolicy, "a SparsePolicy, say SparsePolicy(topk=0.3)")
    if order is not None:
        check_kind("order", order, TokenOrder, "what grid_order makes")
    if head_settings is not None:
        made = "what HeadSettings or HeadSettings.uniform makes"
        check_kind("head_settings", head_settings, HeadSettings, made)
    q, k = as_heads_first("q", q, layout), as_heads_first("k", k, layout)
    check_pair(q, k)
    v = as_heads_first("v", v, layout)
    check_values(k, v)
    check_pair(q, v, "v")
    check_key_lengths(key_lengths, q)
    check_block_mask(block_mask, q, k, None if order is None else order.slots)
    check_gradients(q, k, v, policy, head_settings)
    is_causal = flag("is_causal", is_causal)
    if key_lengths is not None and key_lengths.dim() == 2:
        if is_causal or causal is not None or order is not None:
            raise Unsupported(MOVED)
        key_lengths = key_lengths.squeeze(1)
    queries, keys = q.shape[2], k.shape[2]
    ends_with_keys = ends_with_the_keys(is_causal, causal, queries, keys)
    is_causal = is_causal or causal is not None
    if head_settings is not None and block_mask is not None:
        raise ValueError(
            "block_mask replaces routing, which head_settings are about: give one or the other."
        )
    if order is not None:
        _check_order(order, queries, keys, is_causal, key_lengths)
    if head_settings is not None:
        _check_settings(head_settings, q, policy, is_causal, order)
    scale = checked_scale(scale, q.shape[-1])
    if ends_with_keys:
        check_bottom_right(queries, keys, key_lengths, block_mask)
    check_output_dtype(output_dtype)
    check_layout("out_layout", out_layout)
    return_lse = flag("return_lse", return_lse)
    if stats is not None:
        _check_stats(stats, q.device)
    return CheckedCall(
        q,
        k,
        v,
        policy,
        policy.attention_sink,
        policy.exact_prefix,
        policy.exact_suffix,
        scale,
        is_causal,
        ends_with_keys and queries != keys,
        key_lengths,
        block_mask,
        order,
        head_settings,
        out_layout,
        output_dtype or q.dtype,
        return_lse,
    )


def check_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy,
    head_settings: HeadSettings | None,
) -> None:
    """Checks that no derivative is wanted, which no other fact of a call shows."""
    of_heads = () if head_settings is None else head_settings.tensors.values()
    check_inference(q, k, v, *policy.per_head.values(), *of_heads)


def _check_order(
    order: TokenOrder, queries: int, keys: int, is_causal: bool, key_lengths: Tensor | None
) -> None:
    if is_causal:
        raise Unsupported(
            "A token order and is_causal do not go together: blocks of an order hold tokens "
            "from before and after. Leave one of them out."
        )
    if queries != order.tokens or keys != order.tokens:
        raise Unsupported(
            f"The call has {queries} queries and {keys} keys; the token order is one of "
            f"{order.tokens} tokens that attend to each other. Make an order for this grid."
        )
    if key_lengths is not None and order.least_keys is None:
        raise Unsupported(
            "key_lengths and an order of a permutation or another sequence do not go together: "
            "what they cut off stands in several places. Leave one of them out."
        )


def _check_settings(
    settings: HeadSettings,
    q: Tensor,
    policy: SparsePolicy,
    is_causal: bool,
    order: TokenOrder | None,
) -> None:
    if settings.order_kind is not None and order is None:
        raise ValueError(
            "The head settings say which token order each head takes, and no order is given: "
            "give order=grid_order(grid), or head settings without order_kind."
        )
    reason = ""
    if settings.output_scale is not None and is_causal:
        reason = "its mean value would tell causal attention of later keys"
    elif settings.output_scale is not None and policy.precision is Precision.SIXTEEN_BIT:
        reason = "16-bit operands do not know it, as they are not taken around a mean"
    if reason:
        raise Unsupported(f"The head settings have an output_scale, but {reason}: leave it out.")
    if settings.heads != q.shape[1] or settings.device != q.device:
        raise ValueError(
            f"The head settings are for {settings.heads} heads on {settings.device}, q "
            f"has {q.shape[1]} heads on {q.device}: give one value for each head, on q's device."
        )


def _check_stats(stats: AttentionStats, device: torch.device) -> None:
    check_kind("stats", stats, AttentionStats, f"an AttentionStats({str(device)!r})")
    if stats.counters.device != device:
        raise ValueError(
            f"stats count on {stats.counters.device} and q is on {device}: give "
            f"AttentionStats({str(device)!r})."
        )
