# SPDX-License-Identifier: Apache-2.0
"""Calibration's measurement on the GPU, in groups of heads that bound the memory.

Of each group: keys and values quantized, the sampled query blocks routed for every candidate in one
launch, and attended to in one, bucket by bucket. Routers and buckets are dimensions here, not
loops; see `scoring`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..call import element_of
from ..kernels import capabilities
from ..launch import Select
from ..plan.blocks import QUERY_BLOCK, WORD_BITS, block_count, unpack
from ..plan.grid import TokenOrder
from ..policy import PV_FILTER_OFF, Precision
from ..reference.attend import LOG2_E
from ..reference.partial import Partial
from ..workspace import CallShape, WorkspaceLayout
from .measure import Measure, Measured, Sample, reference_measure
from .sampled_rows import SampledRows
from .scoring import Products, distances, products

#: Bytes that a group of heads may take, of the 100 MB that calibration may: workspace, sums, rows.
_GROUP_BYTES = 94_000_000
#: Share of the key blocks in the longest piece of a bucket. A group of 5 heads is a tenth of a
#: millisecond of work, and a row of blocks that one SM walks alone must not take twice as long.
_LONGEST_PIECE = 0.2


def kernel_measure(sample: Sample) -> Measured:
    """A `Measure` on the library's own kernels; causal samples take the reference.

    Exact parts are attended to in the arithmetic that the sparse calls will use. Pooled parts have
    fp16 operands: rounding their few keys is no part of what candidates differ in.
    """
    if sample.workload.is_causal:
        return reference_measure(sample)
    order = sample.workload.order.on(sample.q.device)
    rows = SampledRows.of(sample, order)
    found = [_Group.of(sample, order, rows, heads).products() for heads in _head_groups(sample)]
    pieces = _pieces(sample.candidates.densities)
    return Measured(distances(_joined(found), pieces), rows.occupied[:, :: sample.row_step])


def measure_for(device: torch.device | str) -> Measure:
    """The `Measure` that runs on `device`: the kernels where they can, else the reference."""
    return kernel_measure if capabilities(device).usable else reference_measure


def _joined(groups: Sequence[Products]) -> Products:
    return Products(
        torch.cat([group.gram for group in groups], -5),
        torch.cat([group.exact_logs for group in groups], -3),
        torch.cat([group.pooled_logs for group in groups], -3),
    )


def _head_groups(sample: Sample) -> Iterator[slice]:
    """KV heads, in groups of about one size."""
    kv_heads = sample.k.shape[1]
    groups = block_count(kv_heads, max(1, _GROUP_BYTES // _bytes_a_kv_head(sample)))
    for first, end in pairwise(kv_heads * group // groups for group in range(groups + 1)):
        yield slice(first, end)


def _bytes_a_kv_head(sample: Sample) -> int:
    """Of the workspace and attend, or of scoring once the workspace is gone."""
    batch, heads, _, channels = sample.q.shape
    routers, densities, _ = sample.candidates.shape
    rows = batch * heads // sample.k.shape[1] * len(sample.query_blocks) * QUERY_BLOCK
    pieces = routers * sum(_pieces(sample.candidates.densities))
    attended = rows * (pieces + 1) * (channels * (4 + sample.q.element_size()) + 8)
    masses = sample.workload.key_blocks * (2 * routers * (densities - 1) + 6)
    values = 4 * channels * (pieces + routers * densities)
    scored = rows // sample.row_step * (masses + values)
    shape = _routed_shape(sample.of_heads(slice(0, 1)))
    return attended + max(_layout(shape, sample, with_queries=True).nbytes, scored)


def _pieces(densities: tuple[float, ...]) -> list[int]:
    """Into how many pieces the bucket of each density is cut."""
    widths = [after - before for before, after in pairwise((0.0, *densities))]
    return [math.ceil(width / _LONGEST_PIECE - 1e-6) for width in widths]


def _routed_shape(sample: Sample) -> CallShape:
    """Of a call whose queries are the sampled blocks and whose heads are the candidates of each
    head, all routers and all densities but the last."""
    batch, heads, _, channels = sample.q.shape
    routers, densities, _ = sample.candidates.shape
    queries, slots = len(sample.query_blocks) * QUERY_BLOCK, sample.workload.order.slots
    candidates = heads * routers * (densities - 1)
    return CallShape(batch, candidates, sample.k.shape[1], queries, slots, channels)


def _layout(shape: CallShape, sample: Sample, *, with_queries: bool) -> WorkspaceLayout:
    element = element_of(Precision.INT8, sample.q)
    return WorkspaceLayout(
        shape, element, with_values=True, with_queries=with_queries, with_pools=True
    )


@dataclass(frozen=True, eq=False)
class _PooledBlocks:
    """Every key block as one pseudo-key."""

    keys: Tensor  # (B, Hkv, D, nk) float32, around the mean key
    values: Tensor  # (B, Hkv, nk, D) fp16, in units of `unit`
    unit: Tensor  # (B, Hkv, 1, 1) float32

    @classmethod
    def of(cls, workspace: Tensor, layout: WorkspaceLayout, channels: int) -> _PooledBlocks:
        """Copies: the workspace is not kept."""
        keys = layout.view(workspace, "k_block_mean")[..., :channels].transpose(-1, -2).contiguous()
        values = layout.view(workspace, "v_block_mean")[..., :channels]
        values = values + layout.view(workspace, "v_mean")[..., :channels].unsqueeze(2)
        tiny = torch.finfo(torch.float32).tiny
        unit = torch.linalg.vector_norm(values, torch.inf, (-1, -2), True).clamp_(min=tiny)
        return cls(keys, torch.div(values, unit).half(), unit)

    def unit_of_query_heads(self, heads: int) -> Tensor:
        """(B, heads, 1, 1)."""
        batch, kv_heads = self.unit.shape[:2]
        return self.unit.expand(-1, -1, heads // kv_heads, -1).reshape(batch, heads, 1, 1)


@dataclass(frozen=True, eq=False)
class _Group:
    """Some heads of a sample."""

    sample: Sample
    order: TokenOrder
    rows: SampledRows  # of all heads
    q: Tensor  # (B, H, S x 128, D), the sampled rows
    means: Tensor  # (B, H, S, D) float32, of their blocks

    @classmethod
    def of(cls, sample: Sample, order: TokenOrder, rows: SampledRows, kv_heads: slice) -> _Group:
        group = sample.q.shape[1] // sample.k.shape[1]
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        return cls(sample.of_heads(kv_heads), order, rows, rows.q[:, heads], rows.means[:, heads])

    def products(self) -> Products:
        exact, kept, blocks = self._attended()
        pooled = self._pooled(kept, blocks)
        return products(exact, pooled, blocks.unit_of_query_heads(self.q.shape[1]))

    def _attended(self) -> tuple[Partial, Tensor, _PooledBlocks]:
        """The exact parts (routers, pieces, B, H, S, rows, ...), the maps of `_kept`, and what
        pooled parts take from the workspace, which is gone by then."""
        sample, order = self.sample, self.order
        shape = _routed_shape(sample)
        layout = _layout(shape, sample, with_queries=True)
        room = layout.nbytes - _layout(shape, sample, with_queries=False).nbytes
        workspace = ops.quantize(
            sample.q,
            sample.k,
            sample.v,
            sample.key_lengths,
            True,
            int(layout.element),
            False,
            True,
            order.slot_tokens,
            order.block_counts,
            sample.walk,
            room,
        )
        kept = self._kept(workspace, layout)
        exact = self._exact(workspace, layout, self._in_pieces(kept))
        return exact, kept, _PooledBlocks.of(workspace, layout, shape.channels)

    def _kept(self, workspace: Tensor, layout: WorkspaceLayout) -> Tensor:
        """(B, H, routers, densities - 1, S, words) int32: the block map of each candidate."""
        sample, shape = self.sample, layout.shape
        routers, densities, _ = sample.candidates.shape
        candidates = routers * (densities - 1)
        batch, heads, blocks, channels = self.means.shape
        layout.view(workspace, "q_similarity").zero_()
        means = layout.view(workspace, "q_block_mean").view(batch, heads, candidates, blocks, -1)
        means.copy_(pad(self.means, (0, means.shape[-1] - channels)).unsqueeze(2).expand_as(means))
        kept, _ = ops.route(
            workspace,
            shape.sizes(),
            int(layout.element),
            True,
            sample.key_lengths,
            None,
            self.rows.thresholds.repeat(heads, 1),
            int(Select.TOPK),
            1,
            1.0,
            0.0,
            sample.scale,
            False,
            sample.workload.sink,
            False,
            0,
            0,
            None,
            True,
            sample.candidates.floor,
            True,
            None,  # the sampled blocks are no slots of the order
            self.order.keys_exact,
            None,
        )
        return kept.view(batch, heads, routers, densities - 1, blocks, -1)

    def _in_pieces(self, kept: Tensor) -> Tensor:
        """(B, H, routers, pieces, S, words) int32: what each density adds, in pieces."""
        every = self.rows.every_block[:, None, None, None, None].expand_as(kept[:, :, :, :1])
        kept = torch.cat([kept, every], 3)
        added = (kept[:, :, :, :1], *(kept[:, :, :, 1:] ^ kept[:, :, :, :-1]).split(1, 3))
        counts = _pieces(self.sample.candidates.densities)
        pieces = [
            bucket if count == 1 else bucket & _every(count, first)
            for bucket, count in zip(added, counts, strict=True)
            for first in range(count)
        ]
        return torch.cat(pieces, 3)

    def _exact(self, workspace: Tensor, layout: WorkspaceLayout, pieces: Tensor) -> Partial:
        """Each sampled block attends to each piece of its key blocks, as a query block of its
        own."""
        sample = self.sample
        batch, heads, routers, count, blocks, words = pieces.shape
        rows = self.q.repeat(1, 1, routers * count, 1)
        sums = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        row_max = sums.new_empty(sums.shape[:3])
        row_sum = torch.empty_like(row_max)
        ops.attend(
            rows,
            workspace,
            pieces.view(batch, heads, -1, words),
            replace(layout.shape, heads=heads, queries=rows.shape[2]).sizes(),
            int(layout.element),
            False,
            sample.key_lengths,
            None,
            sample.scale,
            PV_FILTER_OFF,
            False,
            False,
            rows,  # what is not asked for goes where every row was read before it is written
            None,
            sums,
            row_max,
            row_sum,
            None,
        )

        def compared(values: Tensor) -> Tensor:
            by_piece = values.unflatten(2, (routers, count, blocks, QUERY_BLOCK))
            return by_piece.movedim((2, 3), (0, 1))[:, :, :, :, :, :: sample.row_step]

        return Partial(compared(sums), compared(row_max), compared(row_sum))

    def _pooled(self, kept: Tensor, blocks: _PooledBlocks) -> Partial:
        """(routers, densities - 1, B, H, S, rows, ...): of each density the blocks that it drops,
        as pseudo-keys around one maximum a row; what underflows counts for nothing."""
        p, row_max = self._pseudo_keys(blocks)
        dropped = ~unpack(kept, p.shape[-1])
        p = p[:, :, None, None] * dropped.unsqueeze(-2)
        of_kv_head = p.view(*blocks.values.shape[:2], -1, p.shape[-1])
        sums = (of_kv_head @ blocks.values).view(*p.shape[:-1], -1).movedim((2, 3), (0, 1))
        row_sum = p.sum(-1, dtype=torch.float32).movedim((2, 3), (0, 1))
        return Partial(sums, row_max.expand_as(row_sum), row_sum)

    def _pseudo_keys(self, blocks: _PooledBlocks) -> tuple[Tensor, Tensor]:
        """Weights (B, H, S, rows, nk) fp16 of all pseudo-keys, of the row's maximum
        (B, H, S, rows)."""
        q = self.q.unflatten(2, (-1, QUERY_BLOCK))[:, :, :, :: self.sample.row_step].float()
        batch, kv_heads, channels, key_blocks = blocks.keys.shape
        bias = self.rows.log_counts[:, None, None].expand(-1, kv_heads, -1, -1)
        logits = torch.baddbmm(
            bias.reshape(batch * kv_heads, 1, key_blocks),
            q.reshape(batch * kv_heads, -1, channels),
            blocks.keys.flatten(0, 1),
            alpha=self.sample.scale * LOG2_E,
        )
        row_max = logits.amax(-1, keepdim=True)
        least = torch.finfo(torch.float32).min
        p = logits.sub_(row_max.clamp_(min=least)).exp2_().half()  # of a row without any, 0
        return p.view(*q.shape[:-1], key_blocks), row_max.view(q.shape[:-1])


def _every(count: int, first: int) -> int:
    """Every `count`-th bit of a map's word from `first` on, as int32."""
    bits = sum(1 << bit for bit in range(first, WORD_BITS, count))
    return bits - (bits >> (WORD_BITS - 1) << WORD_BITS)
