# SPDX-License-Identifier: Apache-2.0
"""The pipeline: quantize, route, attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor

from . import on_reference, ops, reference, reference_op
from .call import Call, make_call
from .errors import Unsupported
from .kernel_check import build_kernels
from .kernels import capabilities
from .plan.blocks import BlockPlan
from .plan.budget import HeadBudget
from .plan.grid import TokenOrder
from .policy import PV_FILTER_OFF, SparsePolicy
from .route_rules import Select
from .stats import AttentionStats, Counter
from .validate import as_heads_first, check_output_dtype
from .workspace import layout_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Workspace a call may take, as a share of q + k + v; beyond it heads are served in groups.
MEMORY_SHARE = 0.55
#: Never split for less than this many bytes: padding alone outgrows the share in tiny calls.
MEMORY_FLOOR = 1 << 20


@dataclass(frozen=True, eq=False)
class Partials:
    """Unnormalised attention over the kept blocks, float32: out = out_sum / row_sum.

    out_sum (B, H, Nq, D) = sum of exp2(s - row_max) v; row_max (B, H, Nq), log2 units of the
    mean-centred logits, -inf for rows without keys; row_sum (B, H, Nq). Logits are centred around
    the mean of the call's own keys: parts of one k can be combined as they are, those of different
    keys only where the policy has ``smooth_k=False``.
    """

    out_sum: Tensor
    row_max: Tensor
    row_sum: Tensor


class _Options(TypedDict, total=False):
    """Keywords of ``attention`` that do not change what it returns."""

    layout: str
    out_layout: str | None
    is_causal: bool
    scale: float | None
    key_lengths: Tensor | None
    block_mask: Tensor | None
    plan: BlockPlan | None
    order: TokenOrder | None
    budget: HeadBudget | None
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
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
    plan: BlockPlan | None = None,
    order: TokenOrder | None = None,
    budget: HeadBudget | None = None,
    stats: AttentionStats | None = None,
    output_dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Block-sparse attention, a replacement for ``scaled_dot_product_attention`` without a mask.

    Args:
        q: (B, H, Nq, D) in layout "HND", (B, Nq, H, D) in "NHD"; bf16, fp16 or fp32 (read as
            bf16); any strides with a contiguous last dimension; D up to 128.
        k, v: the same with Hkv heads, H a multiple of Hkv; dtypes may differ from q's.
        policy: what to keep and how to compute; the default keeps half of the key blocks.
        out_layout: layout of the result, ``layout`` when None.
        is_causal: query i sees keys 0..i (top-left), element by element.
        scale: softmax scale, D ** -0.5 when None.
        key_lengths: (B,) int32; keys at and beyond it are never read. With an order they may cut
            the tokens after the grid, and nothing of the grid.
        block_mask: (B, H, ceil(Nq / 128), ceil(Nk / 64)), nonzero keeps; replaces routing.
        plan: from ``make_plan``; replaces routing.
        order: from ``cube_order`` or ``grid_order``: tokens that lie close together share blocks,
            and its exact tokens replace the policy's. q, k, v and the result stay as they come.
        budget: density, pooled residual or background, contrast, and router of each head; replaces
            the policy's density.
        stats: counters that this call adds to.
        output_dtype: dtype of the result, q's when None.
        return_lse: also return the natural log-sum-exp (B, H, Nq) float32 over the kept keys. With
            8-bit operands on sm_90a it is that of the weights as rounded to E4M3, as is the result:
            off by 1e-3 as a rule, by .06 at most where one weight makes the row.

    Returns:
        The result; rows that see no key are 0 (log-sum-exp -inf).

    Raises:
        Unsupported: the call is valid but cannot be served; ``reason`` says why.
        ValueError: shapes, dtypes or devices do not fit together.
        KernelBuildError: a kernel does not compile, and no other target can take over: there is
            none, calls use this one already, or torch.compile traced the call (call
            ``sparge.kernels.warm(device)`` before); ``log`` says why.
    """
    call = make_call(
        q, k, v, policy, layout, is_causal, scale, key_lengths, block_mask, plan, order, budget
    )
    check_output_dtype(output_dtype)
    dtype = output_dtype or call.q.dtype
    out_layout = layout if out_layout is None else out_layout
    if stats is not None and stats.counters.device != call.q.device:
        raise ValueError(
            f"stats count on {stats.counters.device} and q is on {call.q.device}: give "
            f"AttentionStats({str(call.q.device)!r})."
        )
    out = _empty_output(call, dtype, out_layout)
    lse = None
    if return_lse:
        lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=q.device)
    if stats is not None:
        stats.calls += 1
    counters = None if stats is None else stats.counters
    if _has_kernels(call):
        _run_in_head_groups(call, out, lse, counters)
    else:
        reference_op.run(call, out, lse, counters)
    out = as_heads_first("output", out, out_layout)  # its own inverse: back to the caller's layout
    return out if lse is None else (out, lse)


def make_plan(
    q: Tensor,
    k: Tensor,
    policy: SparsePolicy | None = None,
    *,
    layout: str = "HND",
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
) -> BlockPlan:
    """Routing alone: the plan ``attention`` would use with these arguments. Raises as it does."""
    call = make_call(q, k, None, policy, layout, is_causal, scale, key_lengths, block_mask, None)
    if not _has_kernels(call):
        return reference.make_plan(
            call.q,
            call.k,
            call.policy,
            is_causal=is_causal,
            scale=call.scale,
            key_lengths=key_lengths,
            block_mask=block_mask,
        )
    block_map, counts = _route(call, _quantize(call), None)
    return BlockPlan(block_map, counts, call.shape.queries, call.shape.keys, is_causal, key_lengths)


def attention_partials(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy | None = None,
    *,
    layout: str = "HND",
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
    plan: BlockPlan | None = None,
) -> Partials:
    """Attention before its division by the row sum, so that partial results can be combined: those
    of one k, or with ``smooth_k=False`` of different keys (`Partials`)."""
    call = make_call(q, k, v, policy, layout, is_causal, scale, key_lengths, block_mask, plan)
    if not _has_kernels(call):
        attended, _ = on_reference.attend(call)
        return Partials(attended.unnormalised, attended.row_max, attended.row_sum)
    rows = call.q.shape[:3]
    partials = tuple(
        torch.empty(size, dtype=torch.float32, device=q.device)
        for size in (call.q.shape, rows, rows)
    )
    _run(call, torch.empty_like(call.q), None, None, partials)
    return Partials(*partials)


def _has_kernels(call: Call) -> bool:
    """Where another target could take over, they are built here: before the first launch. Not while
    torch.compile traces: such a call goes by the target of the moment."""
    capability = capabilities(call.q.device)
    if capability.fallback and not torch.compiler.is_compiling():
        build_kernels(call, capability.arch)
    return capability.usable


def _empty_output(call: Call, dtype: torch.dtype, out_layout: str) -> Tensor:
    """(B, H, Nq, D) view of memory in ``out_layout``."""
    batch, heads, queries, channels = call.q.shape
    if out_layout == "HND":
        return torch.empty(batch, heads, queries, channels, dtype=dtype, device=call.q.device)
    out = torch.empty(batch, queries, heads, channels, dtype=dtype, device=call.q.device)
    return as_heads_first("output", out, out_layout)


def _run_in_head_groups(
    call: Call, out: Tensor, lse: Tensor | None, counters: Tensor | None
) -> None:
    """All heads at once when the workspace stays within MEMORY_SHARE and fits, else in groups."""
    shape = call.shape
    kv_heads, group = shape.kv_heads, shape.heads // shape.kv_heads
    step = min(kv_heads, max(1, kv_heads * _memory_limit(call) // _memory_needed(call)))
    first = 0
    while first < kv_heads:
        last = min(first + step, kv_heads)
        query = slice(first * group, last * group)
        part_lse = None
        if lse is not None:
            part_lse = lse if step == kv_heads else torch.empty_like(lse[:, query])
        try:
            part = call if step == kv_heads else call.heads(first, last)
            _run(part, out[:, query], part_lse, counters)
        except torch.OutOfMemoryError as error:
            if step == 1:
                needed = _memory_needed(call.heads(first, last)) / 2**20
                raise Unsupported(
                    f"the {needed:.0f} MiB that sparse attention needs for one head do not fit in "
                    "the GPU's free memory: lower the resolution or length, or free memory."
                ) from error
            step = (step + 1) // 2
            continue
        if lse is not None and part_lse is not None and part_lse is not lse:
            lse[:, query] = part_lse
        first = last


def _memory_needed(call: Call) -> int:
    shape = call.shape
    layout = layout_of(shape, call.element, call.v is not None, call.routes, call.pools)
    rows = shape.batch * shape.heads * shape.query_blocks
    return layout.nbytes + rows * 4 * (shape.map_words + 1)


def _memory_limit(call: Call) -> int:
    tensors = (call.q, call.k) if call.v is None else (call.q, call.k, call.v)
    return max(MEMORY_FLOOR, int(MEMORY_SHARE * sum(x.numel() * x.element_size() for x in tensors)))


def _run(
    call: Call,
    out: Tensor,
    lse: Tensor | None,
    counters: Tensor | None,
    partials: tuple[Tensor, ...] | None = None,
) -> None:
    shape = call.shape
    workspace = _quantize(call)
    if call.plan is None:
        block_map, _ = _route(call, workspace, counters)
    else:
        block_map = call.plan.block_map
        if counters is not None:
            counters[Counter.KEPT] += call.plan.kept_pairs().sum()
            counters[Counter.VALID] += call.plan.valid_pairs().sum()
            counters[Counter.KEPT_BLOCKS] += call.plan.counts.sum()
    pvthreshd = call.policy.pvthreshd
    ops.attend(
        call.q,
        workspace,
        block_map,
        shape.sizes(),
        int(call.element),
        call.routes,
        call.key_lengths,
        call.thresholds,
        call.scale,
        PV_FILTER_OFF if isinstance(pvthreshd, Tensor) else pvthreshd,
        call.policy.pv_filter,
        call.is_causal,
        out,
        lse,
        *(partials or (None, None, None)),
        counters,
        call.pools,
        *_slots(call),
    )


def _quantize(call: Call) -> Tensor:
    return ops.quantize(
        call.q,
        call.k,
        call.v,
        call.key_lengths,
        call.policy.smooth_k,
        int(call.element),
        call.routes,
        call.pools,
        *_slots(call),
        with_similarity=call.asks_similarity,
        with_query_means=call.scores,
    )


def _slots(call: Call) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(walks, slots) tokens, (key_blocks,) counts and (heads,) walks, None what there is not."""
    order, budget = call.order, call.budget
    if order is None:
        return None, None, None
    return order.slot_tokens, order.block_counts, None if budget is None else budget.walk


def _route(call: Call, workspace: Tensor, counters: Tensor | None) -> tuple[Tensor, Tensor]:
    policy, shape, order = call.policy, call.shape, call.order
    select = Select.TOPK if policy.select_by == "topk" else Select.CDF
    return ops.route(
        workspace,
        shape.sizes(),
        int(call.element),
        call.v is not None,
        call.key_lengths,
        call.block_mask,
        call.thresholds,
        int(select if call.block_mask is None else Select.MASK),
        max(1, int(_scalar(policy.topk) * shape.key_blocks)),
        _scalar(policy.cdfthreshd),
        _scalar(policy.simthreshd1),
        call.scale,
        call.is_causal,
        policy.attention_sink,
        policy.keep_diagonal,
        policy.exact_prefix,
        policy.exact_suffix,
        counters,
        call.pools,
        1 if call.budget is None else call.budget.floor,
        call.budget is None and order is None,
        None if order is None else order.block_counts,
        None if order is None else order.keys_exact,
        None if order is None else order.queries_exact,
    )


def _scalar(value: float | Tensor) -> float:
    """Per-head values travel in ``thresholds``; their scalar is not read then."""
    return 1.0 if isinstance(value, Tensor) else float(value)
