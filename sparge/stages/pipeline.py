# SPDX-License-Identifier: Apache-2.0
"""Call through its stages: quantize (with means before it), route, attend. Heads go in groups where
memory is short."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from ..blocks import ALL_BLOCKS
from ..call import CheckedCall
from ..errors import Unsupported
from ..kernels import KernelSpec, capabilities, warm
from ..kernels.spec import attend_entry
from ..policy import PV_FILTER_OFF
from . import on_reference, ops
from .rules import NO_ORDER, AttendRules, OrderFacts, QuantizeRules, RouteRules, Select
from .workspace import layout_of

#: Workspace that a call may take, as a share of q + k + v; beyond it heads are served in groups.
MEMORY_SHARE = 0.55
#: Least bytes for which a call is split: padding alone outgrows the share in tiny calls.
MEMORY_FLOOR = 1 << 20
#: Kinds of calls whose kernels were built.
_built: set[Hashable] = set()


def run(call: CheckedCall, out: Tensor, lse: Tensor | None, counters: Tensor | None) -> None:
    """Writes `out` (B, H, Nq, D) and `lse` (B, H, Nq), and adds to `counters`."""
    if has_kernels(call):
        _run_in_head_groups(call, out, lse, counters)
    else:
        on_reference.run(call, out, lse, counters)


def has_kernels(call: CheckedCall) -> bool:
    """Whether kernels serve the call. Where another target could take over they are built here,
    before the first launch; not while torch.compile traces: such a call goes by the target of the
    moment."""
    capability = capabilities(call.q.device)
    if capability.fallback and not torch.compiler.is_compiling():
        build_kernels(call, capability.arch)
    return capability.usable


def build_kernels(call: CheckedCall, arch: str) -> None:
    """Builds kernels for ``arch``, the target of the moment, or the next one whose kernels compile.

    Targets differ in operand types and in the layout of the workspace, so a call that began on one
    cannot end on the next. A set is looked into where kernels were built before. Raises
    KernelBuildError as `warm` does.
    """
    q = call.q
    kind = (arch, q.device, q.dtype, int(q.shape[3]), call.element, call.policy.pv_filter)
    if kind not in _built:
        warm(q.device, lambda arch: _specs_of(call, arch))
        _built.add(kind)


def _specs_of(call: CheckedCall, arch: str) -> Iterable[KernelSpec]:
    """Specs of a call like this, with or without a mask of its own."""
    for entry in ("means", "quantize", "route", attend_entry(arch, call.element)):
        yield KernelSpec(entry, arch, call.shape.head_dim, call.element, call.policy.pv_filter)


def _run_in_head_groups(
    call: CheckedCall,
    out: Tensor,
    lse: Tensor | None,
    counters: Tensor | None,
) -> None:
    """Runs all heads at once when the workspace stays within MEMORY_SHARE and fits, else in
    groups.
    """
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
            run_kernels(part, out[:, query], part_lse, counters)
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


def fits(call: CheckedCall) -> bool:
    """Whether all heads are served at once."""
    return _memory_needed(call) <= _memory_limit(call)


def _memory_needed(call: CheckedCall) -> int:
    shape = call.shape
    layout = layout_of(shape, call.element, call.routes, call.pools)
    rows = shape.batch * shape.heads * shape.query_blocks
    return layout.nbytes + rows * 4 * shape.map_words


def _memory_limit(call: CheckedCall) -> int:
    given = sum(x.numel() * x.element_size() for x in (call.q, call.k, call.v))
    return max(MEMORY_FLOOR, int(MEMORY_SHARE * given))


def run_kernels(
    call: CheckedCall,
    out: Tensor,
    lse: Tensor | None,
    counters: Tensor | None,
) -> None:
    """Runs all heads at once."""
    workspace = quantize(call)
    if call.is_whole and counters is None:
        block_map = full_map(call)
    else:
        block_map = route(call, workspace, counters)
    attend(call, workspace, block_map, out, lse, counters)


def full_map(call: CheckedCall) -> Tensor:
    """Block map of a call that keeps everything."""
    shape, device = call.shape.map_shape, call.q.device
    return torch.full(shape, ALL_BLOCKS, dtype=torch.int32, device=device)


def attend(
    call: CheckedCall,
    workspace: Tensor,
    block_map: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    pvthreshd = call.policy.pvthreshd
    rules = AttendRules(
        with_pools=call.pools,
        scale=call.scale,
        pvthreshd=PV_FILTER_OFF if isinstance(pvthreshd, Tensor) else pvthreshd,
        pv_filter=call.policy.pv_filter,
        causal=call.is_causal,
    )
    ops.attend(
        call.q,
        workspace,
        block_map,
        call.shape.sizes(),
        int(call.element),
        *rules.flat(),
        call.key_lengths,
        call.thresholds,
        _slots(call).flat(),
        out,
        lse,
        *(None, None, None),
        counters,
    )


def quantize(call: CheckedCall) -> Tensor:
    rules = QuantizeRules(
        smooth_k=call.policy.smooth_k,
        with_queries=call.routes,
        with_pools=call.pools,
        with_similarity=call.asks_similarity,
        with_query_means=call.scores,
    )
    tensors = (call.q, call.k, call.v, call.key_lengths)
    return ops.quantize(*tensors, int(call.element), *rules.flat(), _slots(call).flat())


def _slots(call: CheckedCall) -> OrderFacts:
    """(order kinds, slots) tokens, (key_blocks,) counts and (heads,) order kinds."""
    order, head_settings = call.order, call.head_settings
    if order is None:
        return NO_ORDER
    order_kind = None if head_settings is None else head_settings.order_kind
    return OrderFacts(order.slot_tokens, order.block_counts, order_kind)


def route(call: CheckedCall, workspace: Tensor, counters: Tensor | None) -> Tensor:
    policy, shape, order = call.policy, call.shape, call.order
    select = Select.TOPK if policy.select_by == "topk" else Select.CDF
    rules = RouteRules(
        select=int(select if call.block_mask is None else Select.MASK),
        topk_blocks=max(1, int(_scalar(policy.topk) * shape.key_blocks)),
        cdfthreshd=_scalar(policy.cdfthreshd),
        simthreshd1=_scalar(policy.simthreshd1),
        score_scale=call.scale,
        causal=call.is_causal,
        attention_sink=policy.attention_sink,
        keep_diagonal=policy.keep_diagonal,
        exact_prefix=policy.exact_prefix,
        exact_suffix=policy.exact_suffix,
        floor=1 if call.head_settings is None else call.head_settings.floor,
        upstream=call.head_settings is None and order is None,
    )
    facts = NO_ORDER
    if order is not None:
        facts = OrderFacts(
            slot_counts=order.block_counts,
            keys_exact=order.keys_exact,
            queries_exact=order.queries_exact,
        )
    return ops.route(
        workspace,
        shape.sizes(),
        int(call.element),
        call.pools,
        *rules.flat(),
        call.key_lengths,
        call.block_mask,
        call.thresholds,
        facts.flat(),
        counters,
    )


def _scalar(value: float | Tensor) -> float:
    """Number of a threshold. Per-head values travel in ``thresholds``; their number is not read
    then."""
    return 1.0 if isinstance(value, Tensor) else float(value)
