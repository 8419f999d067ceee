# SPDX-License-Identifier: Apache-2.0
"""Call through its stages: quantize, route, attend. Heads go in groups where memory is short."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops, reference_op
from .call import Call
from .errors import Unsupported
from .kernel_check import build_kernels
from .kernels import capabilities
from .policy import PV_FILTER_OFF
from .route_rules import Select
from .stats import Counter
from .workspace import layout_of

#: Workspace that a call may take, as a share of q + k + v; beyond it heads are served in groups.
MEMORY_SHARE = 0.55
#: Least bytes for which a call is split: padding alone outgrows the share in tiny calls.
MEMORY_FLOOR = 1 << 20


def run(call: Call, out: Tensor, lse: Tensor | None, counters: Tensor | None) -> None:
    """Writes `out` (B, H, Nq, D) and `lse` (B, H, Nq), and adds to `counters`."""
    if has_kernels(call):
        _run_in_head_groups(call, out, lse, counters)
    else:
        reference_op.run(call, out, lse, counters)


def has_kernels(call: Call) -> bool:
    """Whether kernels serve the call. Where another target could take over they are built here,
    before the first launch; not while torch.compile traces: such a call goes by the target of the
    moment."""
    capability = capabilities(call.q.device)
    if capability.fallback and not torch.compiler.is_compiling():
        build_kernels(call, capability.arch)
    return capability.usable


def _run_in_head_groups(
    call: Call, out: Tensor, lse: Tensor | None, counters: Tensor | None
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


def _memory_needed(call: Call) -> int:
    shape = call.shape
    layout = layout_of(shape, call.element, call.v is not None, call.routes, call.pools)
    rows = shape.batch * shape.heads * shape.query_blocks
    return layout.nbytes + rows * 4 * (shape.map_words + 1)


def _memory_limit(call: Call) -> int:
    tensors = (call.q, call.k) if call.v is None else (call.q, call.k, call.v)
    return max(MEMORY_FLOOR, int(MEMORY_SHARE * sum(x.numel() * x.element_size() for x in tensors)))


def run_kernels(
    call: Call,
    out: Tensor,
    lse: Tensor | None,
    counters: Tensor | None,
    partials: tuple[Tensor, ...] | None = None,
) -> None:
    shape = call.shape
    workspace = quantize(call)
    if call.plan is None:
        block_map, _ = route(call, workspace, counters)
    else:
        block_map = call.plan.block_map
        if counters is not None:
            counters[Counter.KEPT] += call.plan.kept_pairs().sum()
            counters[Counter.VALID] += call.plan.valid_pairs().sum()
            counters[Counter.KEPT_BLOCKS] += call.plan.visited_blocks().sum()
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


def quantize(call: Call) -> Tensor:
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
    """(orders, slots) tokens, (key_blocks,) counts and (heads,) orders; None for what there is
    not.
    """
    order, budget = call.order, call.budget
    if order is None:
        return None, None, None
    return order.slot_tokens, order.block_counts, None if budget is None else budget.walk


def route(call: Call, workspace: Tensor, counters: Tensor | None) -> tuple[Tensor, Tensor]:
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
    """Number of a threshold. Per-head values travel in ``thresholds``; their number is not read
    then."""
    return 1.0 if isinstance(value, Tensor) else float(value)
