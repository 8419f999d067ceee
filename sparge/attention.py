# SPDX-License-Identifier: Apache-2.0
"""Public call: `attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor

from .call import CheckedCall, make_call
from .checks.argument import check_kind, flag
from .checks.validate import Alignment, as_heads_first, check_layout, check_output_dtype
from .head_settings import HeadSettings
from .order.grid import TokenOrder
from .policy import SparsePolicy
from .stages.bottom_right import run_bottom_right
from .stages.pipeline import run
from .stats import AttentionStats

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Options(TypedDict, total=False):
    """Keywords of ``attention`` that do not change what it returns."""

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
) -> Tensor | tuple[Tensor, Tensor]:
    """Block-sparse attention, a replacement for ``scaled_dot_product_attention`` without a mask.

    Args:
        q: (B, H, Nq, D) in layout "HND", (B, Nq, H, D) in "NHD"; bf16, fp16 or fp32 (read as
            bf16); any strides with a contiguous last dimension; D up to 128.
        k, v: as q, with Hkv heads, H a multiple of Hkv; dtypes may differ from q's.
        policy: what to keep and how to compute; the default keeps half of the key blocks.
        out_layout: layout of the result, ``layout`` when None.
        is_causal: query i sees keys 0..i, element by element, of as many keys as queries.
        causal: the same for any numbers of them: "top-left", query i sees keys 0..i; or
            "bottom-right", the last query sees the last key (a cache of keys, chunks of a text).
            The latter is made of two calls, whose shares and exact tokens count by themselves.
        scale: softmax scale, D ** -0.5 when None.
        key_lengths: (B,) int32; keys at and beyond it are never read. With an order they may cut
            the tokens after the grid, and nothing of the grid.
        block_mask: (B, H, ceil(Nq / 128), ceil(Nk / 64)), nonzero keeps; replaces routing.
        order: from ``cube_order`` or ``grid_order``: tokens that lie close together share blocks,
            and its exact tokens replace the policy's. q, k, v and the result stay as they come.
        head_settings: density, pool weight, output scale, router (what ranks blocks) and order of
            each head; the density replaces the policy's.
        stats: counters that this call adds to.
        output_dtype: dtype of the result, q's when None.
        return_lse: also return the natural log-sum-exp (B, H, Nq) float32 over the kept keys. With
            8-bit operands on sm_90a it is that of the weights as rounded to E4M3, as is the result
            (docs/experiments.md, Log-sum-exp of 8-bit operands).

    Returns:
        The result; rows that see no key are 0 (log-sum-exp -inf). A NaN or an infinity makes NaN:
        in q its row, in k or v every row of the heads that share it, whatever they keep.

    Raises:
        Unsupported: the call is valid but cannot be served; ``reason`` says why.
        ValueError: shapes, dtypes or devices do not fit together.
        KernelBuildError: a kernel does not compile, and no other target can take over: there is
            none, calls use this one already, or torch.compile traced the call (call
            ``sparge.kernels.warm(device)`` before); ``log`` says why.
    """
    call = make_call(
        q, k, v, policy, layout, is_causal, scale, key_lengths, block_mask, order, head_settings,
        causal,
    )  # fmt: skip
    check_output_dtype(output_dtype)
    dtype = output_dtype or call.q.dtype
    out_layout = layout if out_layout is None else out_layout
    check_layout("out_layout", out_layout)
    return_lse = flag("return_lse", return_lse)
    counters = None if stats is None else _counters_of(stats, call.q.device)
    out = _empty_output(call, dtype, out_layout)
    lse = None
    if return_lse:
        lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=q.device)
    if call.bottom_right:
        run_bottom_right(call, out, lse, counters)
    else:
        run(call, out, lse, counters)
    if stats is not None:
        stats.add_call()
    out = as_heads_first("output", out, out_layout)  # its own inverse: back to the caller's layout
    return out if lse is None else (out, lse)


def _counters_of(stats: AttentionStats, device: torch.device) -> Tensor:
    check_kind("stats", stats, AttentionStats, f"an AttentionStats({str(device)!r})")
    if stats.counters.device != device:
        raise ValueError(
            f"stats count on {stats.counters.device} and q is on {device}: give "
            f"AttentionStats({str(device)!r})."
        )
    return stats.counters


def _empty_output(call: CheckedCall, dtype: torch.dtype, out_layout: str) -> Tensor:
    """Empty (B, H, Nq, D) view of memory in ``out_layout``."""
    batch, heads, queries, channels = call.q.shape
    if out_layout == "HND":
        return torch.empty(batch, heads, queries, channels, dtype=dtype, device=call.q.device)
    out = torch.empty(batch, queries, heads, channels, dtype=dtype, device=call.q.device)
    return as_heads_first("output", out, out_layout)
