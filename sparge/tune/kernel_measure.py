# SPDX-License-Identifier: Apache-2.0
"""Measurement on the GPU, in groups of heads that bound the memory.

For each group keys and values are quantized, the measured query blocks are routed for every
candidate in one launch, attended to in one, bucket by bucket, and scored in one, which also pools
what is dropped. Buckets are a dimension here, not a loop; see `scoring`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..blocks import QUERY_BLOCK, block_count
from ..call import element_of
from ..common.partial import Partial
from ..kernels import Element, capabilities
from ..kernels.spec import measuring_element
from ..policy import PV_FILTER_OFF, Precision
from ..stages import ops
from ..stages.rules import AttendRules, OrderFacts, QuantizeRules, RouteRules, Select
from ..stages.workspace import CallShape, WorkspaceLayout, layout_of
from .measure import Measure, Measured, MeasuredCall, reference_measure
from .measured_rows import MeasuredBlocks, MeasuredRows
from .scoring import Distances

#: Bytes that a measurement may take however short the sequence is, and share of the workspace of a
#: sparse call that it may take of a long one (docs/experiments.md, Memory of a measurement).
_LEAST_BYTES, _OF_A_CALL = 83_000_000, 1.25


def kernel_measure(call: MeasuredCall) -> Measured:
    """Computes a `Measure` on the library's own kernels.

    Exact parts are attended to in the arithmetic that the sparse calls will use. Pooled parts have
    float32 mean keys and bf16 mean values: rounding their few keys is no part of what candidates
    differ in.
    """
    facts, groups = _Facts.of(call), list(_head_groups(call))
    found = _room_for_distances(call)
    for place, order_kind in enumerate(call.order_kinds):
        rows = MeasuredRows.of(call, facts.blocks, order_kind, facts.means.shape[-1])
        in_order = replace(call, workload=call.workload.of_kind(order_kind, call.q.device))
        for heads in groups:
            _Group.of(in_order, facts, rows, heads).score(found[:, place])
    by_block = found.unflatten(-1, (len(call.query_blocks), -1))
    occupied = facts.blocks.occupied.index_select(1, facts.blocks.rows)
    return Measured(Distances.of_packed(by_block), occupied)


def measure_for(device: torch.device | str) -> Measure:
    """Returns the `Measure` that runs on `device`: the kernels where they can, else the
    reference.
    """
    return kernel_measure if capabilities(device).usable else reference_measure


@dataclass(frozen=True, eq=False)
class _Facts:
    """Facts shared by all token orders and groups of heads."""

    blocks: MeasuredBlocks
    means: Tensor
    """(3, B, Hkv, channels) float32: the result of `ops.means`."""
    similar: Tensor
    """(B x H x candidates x S,) float32: self-similarity of each routed query block, the same in
    any group."""

    @classmethod
    def of(cls, call: MeasuredCall) -> _Facts:
        blocks = MeasuredBlocks.of(call, call.workload.order.on(call.q.device))
        element = int(_element(call))
        means = ops.means(call.k, call.v, None, True, element, ordered=True)
        batch, heads, *_ = call.q.shape
        routed = batch * heads * _candidates(call) * len(call.query_blocks)
        similar = torch.zeros(routed, dtype=torch.float32, device=call.q.device)
        return cls(blocks, means, similar)


def _room_for_distances(call: MeasuredCall) -> Tensor:
    """Empty tensor for what `Distances.packed` gives, for rows (orders, B, H, S x rows a block)."""
    batch, heads, *_ = call.q.shape
    rows = (len(call.order_kinds), batch, heads, _compared(call))
    fields = Distances.packed_fields(len(call.candidates.densities))
    return torch.empty(fields, *rows, dtype=torch.float32, device=call.q.device)


def _candidates(call: MeasuredCall) -> int:
    """Number of candidates a head, without those of the last density, which drop nothing."""
    return len(call.candidates.densities) - 1


def _compared(call: MeasuredCall) -> int:
    """Number of compared rows a head in one token order."""
    return len(call.query_blocks) * QUERY_BLOCK // call.row_step


def _head_groups(call: MeasuredCall) -> Iterator[slice]:
    """KV heads in groups of about one size, as few as fit."""
    kv_heads = call.k.shape[1]
    of_all, of_one = _bytes_of_all_heads(call), _bytes_a_kv_head(call)
    groups = block_count(kv_heads, max(1, (_room(call) - of_all) // of_one))
    for first, end in pairwise(kv_heads * group // groups for group in range(groups + 1)):
        yield slice(first, end)


def _room(call: MeasuredCall) -> int:
    """Bytes that a measurement may take."""
    shape = CallShape.of(call.q, call.k, call.workload.order.slots)
    workspace = layout_of(shape, _element(call), True, True).nbytes
    return max(_LEAST_BYTES, int(_OF_A_CALL * workspace))


def _bytes_of_all_heads(call: MeasuredCall) -> int:
    """Bytes of the rows of one token order, and of what is found of all orders."""
    batch, heads, _, channels = call.q.shape
    fields = Distances.packed_fields(len(call.candidates.densities))
    measured = batch * heads * len(call.query_blocks) * QUERY_BLOCK
    compared = batch * heads * _compared(call)
    found = 4 * compared * len(call.order_kinds) * fields
    routed = _routed_shape(call)
    means = 4 * batch * routed.heads * routed.query_blocks * (routed.head_dim + 1)
    queries = (measured + compared) * channels * call.q.element_size()
    return queries + means + found


def _bytes_a_kv_head(call: MeasuredCall) -> int:
    """Bytes of the workspace and of attend for each KV head."""
    batch, heads, _, channels = call.q.shape
    rows = batch * heads // call.k.shape[1] * _compared(call)
    buckets = len(call.candidates.densities)
    copies = 1 if _is_one_view(call) else 1 + buckets
    attended = rows * (buckets * (4 * channels + 8) + copies * channels * call.q.element_size())
    return attended + _layout(call.of_heads(slice(0, 1))).nbytes


def _is_one_view(call: MeasuredCall) -> bool:
    """Whether the queries of all buckets are one copy (`_Group._exact`)."""
    return len(call.q) == 1 and call.q.shape[1] == call.k.shape[1]


def _routed_shape(call: MeasuredCall) -> CallShape:
    """Shape of a call whose queries are the measured blocks and whose heads are the candidates of
    each head."""
    batch, heads, _, channels = call.q.shape
    queries, slots = len(call.query_blocks) * QUERY_BLOCK, call.workload.order.slots
    candidates = heads * _candidates(call)
    return CallShape(batch, candidates, call.k.shape[1], queries, slots, channels)


def _layout(call: MeasuredCall) -> WorkspaceLayout:
    return layout_of(_routed_shape(call), _element(call), False, True)


def _element(call: MeasuredCall) -> Element:
    element = element_of(Precision.INT8, call.q)
    return element if element.quantized else measuring_element(capabilities(call.q.device).arch)


@dataclass(frozen=True, eq=False)
class _Group:
    """Some heads of a measurement, in its first token order."""

    call: MeasuredCall
    facts: _Facts  # facts that hold for all heads
    rows: MeasuredRows
    kv_heads: slice
    heads: slice

    @classmethod
    def of(cls, call: MeasuredCall, facts: _Facts, rows: MeasuredRows, kv_heads: slice) -> _Group:
        group = call.q.shape[1] // call.k.shape[1]
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        return cls(call.of_heads(kv_heads), facts, rows.of_heads(heads), kv_heads, heads)

    def score(self, found: Tensor) -> None:
        """Fills in the heads of `found` (fields, B, H, S x rows a block)."""
        layout = _layout(self.call)
        workspace = self._quantized(layout)
        kept = self._kept(workspace, layout)
        exact = self._exact(workspace, layout, self._buckets(kept))
        ops.score(
            exact.unnormalised,
            exact.row_max,
            exact.row_sum,
            self.rows.q,
            workspace,
            layout.shape.sizes(),
            int(layout.element),
            kept,
            self.call.scale,
            found[:, :, self.heads],
        )

    def _quantized(self, layout: WorkspaceLayout) -> Tensor:
        call, order = self.call, self.call.workload.order
        rules = QuantizeRules(
            smooth_k=True, with_queries=False, with_pools=True, with_similarity=False
        )
        return ops.quantize(
            call.q,
            call.k,
            call.v,
            None,
            int(layout.element),
            *rules.flat(),
            OrderFacts(order.slot_tokens, order.block_counts).flat(),
            self.facts.means[:, :, self.kv_heads],
        )

    def _kept(self, workspace: Tensor, layout: WorkspaceLayout) -> Tensor:
        """(B, H, densities - 1, S, words) int32: the block map of each candidate."""
        call, shape = self.call, layout.shape
        rules = RouteRules(
            select=int(Select.TOPK),
            topk_blocks=1,
            cdfthreshd=1.0,
            simthreshd1=0.0,
            score_scale=call.scale,
            causal=False,
            attention_sink=False,
            keep_diagonal=False,
            exact_prefix=0,
            exact_suffix=0,
            floor=1,
            upstream=False,
        )
        # The measured blocks are no slots of the order.
        order = OrderFacts(keys_exact=call.workload.order.keys_exact)
        kept = ops.route(
            workspace,
            shape.sizes(),
            int(layout.element),
            True,
            *rules.flat(),
            None,
            None,
            self.facts.blocks.thresholds[self.heads].flatten(0, 1),
            order.flat(),
            None,
            self.rows.means.flatten(1, 2).contiguous(),
            self.facts.similar,
        )
        return kept.unflatten(1, (-1, _candidates(call)))

    def _buckets(self, kept: Tensor) -> Tensor:
        """(B, H, densities, S, words) int32: what each density keeps beside the one before, from
        the maps `kept` of all but the last, which keeps every block."""
        every = self.facts.blocks.every_block.expand_as(kept[:, :, :1])
        buckets = torch.cat([kept, every], 2)
        buckets[:, :, 1:].bitwise_xor_(kept)
        return buckets

    def _exact(self, workspace: Tensor, layout: WorkspaceLayout, buckets: Tensor) -> Partial:
        """Attends from each measured block to each bucket of its key blocks, as heads of their own.
        Each KV head is a batch entry, so that one copy of the queries serves all buckets."""
        call = self.call
        batch, heads, count, blocks, words = buckets.shape
        kv_heads, slots = call.k.shape[1], self.facts.blocks.compared
        by_kv = (batch * kv_heads, heads // kv_heads * count)
        q = self.rows.q.unsqueeze(2).expand(-1, -1, count, -1, -1)
        q = q.reshape(*by_kv, *q.shape[-2:])
        # Outputs that nobody asks for go where nobody reads them.
        out = q.new_empty(by_kv[0], 1, *q.shape[-2:]).expand_as(q)
        sums = torch.empty(*buckets.shape[:-2], *q.shape[-2:], dtype=torch.float32, device=q.device)
        row_max = sums.new_empty(sums.shape[:-1])
        row_sum = torch.empty_like(row_max)
        rules = AttendRules(
            with_pools=False,
            scale=call.scale,
            pvthreshd=PV_FILTER_OFF,
            pv_filter=False,
            causal=False,
        )
        ops.attend(
            q,
            workspace,
            buckets.view(*by_kv, blocks, words),
            CallShape(
                *by_kv, 1, blocks * QUERY_BLOCK, layout.shape.keys, layout.shape.channels
            ).sizes(),
            int(layout.element),
            *rules.flat(),
            None,
            None,
            OrderFacts(slots).flat(),
            out,
            None,
            sums.view(*q.shape),
            row_max.view(*q.shape[:-1]),
            row_sum.view(*q.shape[:-1]),
            None,
        )
        return Partial(sums, row_max, row_sum)
