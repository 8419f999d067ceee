# SPDX-License-Identifier: Apache-2.0
"""Public call: `attention`."""

from __future__ import annotations

from collections.abc import Hashable
from types import NoneType
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .call import CheckedCall, check_call, check_gradients
from .checks.validate import Alignment
from .compiling import transform_level
from .errors import Unsupported
from .head_settings import HeadSettings
from .kernels import capabilities
from .order.grid import TokenOrder
from .policy import PerHead, SparsePolicy, with_topk
from .stages import op
from .stages.bottom_right import run_bottom_right
from .stages.kind import CallRules, CallTensors, key_of, rules_text
from .stages.prepared import find, prepare
from .stats import AttentionStats

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TENSOR = (Tensor, torch.nn.Parameter)
_MAYBE_TENSOR = (*_TENSOR, NoneType)
_BYTES = (torch.bool, torch.uint8, torch.int8)
_DEFAULT = SparsePolicy()
PACKED = (
    "cu_seqlens is of packed sequences, which one call does not serve: call attention for each, as "
    'q[None, start:end] with layout="NHD", or pad them to one length and give key_lengths.'
)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_trace = torch._C._get_tracing_state


class _Options(TypedDict, total=False):
    """Keywords of ``attention`` that do not change what it returns."""

    topk: PerHead | None
    layout: str
    out_layout: str | None
    is_causal: bool
    causal: Alignment | None
    scale: float | None
    key_lengths: Tensor | None
    block_mask: Tensor | None
    order: TokenOrder | None
    head_settings: HeadSettings | None
    stats: AttentionStats | None
    output_dtype: torch.dtype | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy | None = None,
    *,
    topk: PerHead | None = None,
    layout: str = "HND",
    out_layout: str | None = None,
    is_causal: bool = False,
    causal: Alignment | None = None,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
    order: TokenOrder | None = None,
    head_settings: HeadSettings | None = None,
    stats: AttentionStats | None = None,
    output_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    cu_seqlens: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Block-sparse attention, a replacement for ``scaled_dot_product_attention`` without a mask.

    Args:
        q: (B, H, Nq, D) in layout "HND", (B, Nq, H, D) in "NHD"; bf16, fp16 or fp32 (read as
            bf16); any strides with a contiguous last dimension; D up to 128.
        k, v: as q, with Hkv heads, H a multiple of Hkv; dtypes may differ from q's.
        policy: what to keep and how to compute; the default keeps half of the key blocks.
        topk: share of the key blocks that is kept, in place of a policy.
        out_layout: layout of the result, ``layout`` when None.
        is_causal: query i sees keys 0..i, element by element, of as many keys as queries.
        causal: the same for any numbers of them: "top-left", query i sees keys 0..i; or
            "bottom-right", the last query sees the last key (a cache of keys, chunks of a text).
            The latter is made of two calls, whose shares and exact tokens count by themselves.
        scale: softmax scale, D ** -0.5 when None.
        key_lengths: (B,) int32; keys at and beyond it are never read. With an order they may cut
            the tokens after the grid, and nothing of the grid. (B, 1), as ``KeyPadding.apply``
            gives them, says that keys were moved to the front: causal calls and orders refuse it.
        block_mask: (B, H, ceil(Nq / 128), ceil(Nk / 64)), bool or integers, nonzero keeps; replaces
            routing. Sink and exact tokens are kept beside it. With an order it is of the blocks of
            its slots.
        order: from ``grid_order``: tokens that lie close together share blocks, and its exact
            tokens replace the policy's. q, k, v and the result stay as they come.
        head_settings: density, pool weight, output scale, router (what ranks blocks) and order of
            each head; the density replaces the policy's.
        stats: counters that this call adds to.
        output_dtype: dtype of the result, q's when None.
        return_lse: also return the natural log-sum-exp (B, H, Nq) float32 over the kept keys. With
            8-bit operands on sm_90a it is that of the weights as rounded to E4M3, as is the result
            (docs/experiments.md, Log-sum-exp of 8-bit operands).
        cu_seqlens: refused, with a sentence that says how packed sequences are served.

    Returns:
        The result; with ``return_lse`` a pair of it and the log-sum-exp. Rows that see no key are 0
        (log-sum-exp -inf); with 16-bit operands also rows whose logits all overflow to -inf. A NaN
        or an infinity makes NaN: in q its row, in k or v every row that sees a key, of the heads
        that share it, whatever they keep; with 8-bit operands also causal rows that see no key of
        the blocks that a mask leaves them.

    Raises:
        Unsupported: the call is valid but cannot be served; ``reason`` says why.
        ValueError: shapes, dtypes or devices do not fit together.
        KernelBuildError: a kernel does not compile; ``log`` says why.
    """
    if topk is not None:
        others = {"policy": policy, "block_mask": block_mask, "head_settings": head_settings}
        policy = with_topk(_DEFAULT, topk, others)
    if cu_seqlens is not None:
        raise Unsupported(PACKED, "own")
    policy = _DEFAULT if policy is None else policy
    out_layout = layout if out_layout is None else out_layout
    counters = stats.counters if isinstance(stats, AttentionStats) else None
    key = None
    if (
        not torch.compiler.is_compiling()
        and _dispatch_modes() == 0
        and transform_level() is None
        and _trace() is None
        and type(q) in _TENSOR
        and type(k) in _TENSOR
        and type(v) in _TENSOR
        and type(key_lengths) in _MAYBE_TENSOR
        and type(block_mask) in _MAYBE_TENSOR
        and type(policy) is SparsePolicy
        and type(order) in (TokenOrder, NoneType)
        and type(head_settings) in (HeadSettings, NoneType)
        and type(stats) in (AttentionStats, NoneType)
        and type(layout) is type(out_layout) is str
        and type(is_causal) is type(return_lse) is bool
        and type(causal) in (str, NoneType)
        and type(scale) in (float, NoneType)
        and type(output_dtype) in (torch.dtype, NoneType)
        and not (q.is_neg() or k.is_neg() or v.is_neg())
    ):
        try:
            key = key_of(
                q, k, v, key_lengths, block_mask, counters,
                policy.facts, policy.attention_sink, policy.exact_prefix, policy.exact_suffix,
                None if order is None else order.facts,
                None if head_settings is None
                else (head_settings.facts, head_settings.density.device),
                layout, out_layout, is_causal, causal, scale, output_dtype, return_lse,
            )  # fmt: skip
        except RuntimeError:  # of a nested or a sparse tensor, which the check below refuses
            key = None
    if key is not None and (prepared := find(key)) is not None:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            check_gradients(q, k, v, policy, head_settings)
        tensors = _tensors(
            q, k, v, prepared.kind.shape.heads, policy, key_lengths, block_mask, order,
            head_settings, counters,
        )  # fmt: skip
        out, lse = prepared.run(tensors, layout)
    else:
        call = check_call(
            q, k, v, policy, layout=layout, out_layout=out_layout, is_causal=is_causal,
            causal=causal, scale=scale, key_lengths=key_lengths, block_mask=block_mask,
            order=order, head_settings=head_settings, stats=stats, output_dtype=output_dtype,
            return_lse=return_lse,
        )  # fmt: skip
        if call.ends_with_keys:
            out, lse = run_bottom_right(call, lambda part: _run(part, counters))
        else:
            out, lse = _run(call, counters, key)
    if stats is not None:
        stats.add_call()
    return (out, lse) if return_lse and lse is not None else out


def _run(
    call: CheckedCall, counters: Tensor | None, key: Hashable | None = None
) -> tuple[Tensor, Tensor | None]:
    """Result of a call, and log-sum-exps where it asks for them. key: what calls of this kind are
    found by from now on; None for a call that modes or graphs may have to see."""
    tensors = _tensors(
        call.q, call.k, call.v, call.q.shape[1], call.policy, call.key_lengths, call.block_mask,
        call.order, call.head_settings, counters,
    )  # fmt: skip
    text, exact = rules_text(call), (call.exact_prefix, call.exact_suffix)
    if key is not None and capabilities(call.q.device).usable:
        return prepare(key, tensors, CallRules.of(text, *exact, call.scale)).run(tensors)
    q, k, v, *read = tensors[:-1]
    token_slots = None if call.order is None else call.order.on(call.q.device).token_slots
    out, lse = op.attention(q, k, v, read, token_slots, counters, text, exact, call.scale)
    return out, lse if call.with_lse else None


def _tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    policy: SparsePolicy,
    key_lengths: Tensor | None,
    block_mask: Tensor | None,
    order: TokenOrder | None,
    head_settings: HeadSettings | None,
    counters: Tensor | None,
) -> CallTensors:
    """Tensors that kernels read. heads: those of q."""
    thresholds = order_kind = slots = counts = keys_exact = queries_exact = None
    if head_settings is not None:
        thresholds, order_kind = head_settings.table(policy), head_settings.order_kind
    elif policy.has_tensors:
        thresholds = policy.head_thresholds(heads, q.device)
    if order is not None:
        on_device = order.on(q.device)
        slots, counts = on_device.slot_tokens, on_device.block_counts
        keys_exact, queries_exact = on_device.keys_exact, on_device.queries_exact
    if block_mask is not None and block_mask.dtype not in _BYTES:
        block_mask = block_mask != 0
    return CallTensors(
        q, k, v, key_lengths, block_mask, thresholds, slots, counts, keys_exact, queries_exact,
        order_kind, counters,
    )  # fmt: skip
