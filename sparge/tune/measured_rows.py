# SPDX-License-Identifier: Apache-2.0
"""Query rows and key blocks of a measurement on the GPU, before it touches keys.

They are made once for all groups of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import QUERY_BLOCK, pack
from ..order.grid import EMPTY, TokenOrder
from ..policy import PV_FILTER_OFF
from ..stages.thresholds import SELECTION, threshold_table
from .candidates import CandidateSet
from .measure import MeasuredCall
from .spread import rows_on


@dataclass(frozen=True, eq=False)
class MeasuredBlocks:
    """Facts that are the same in all token orders but `places`."""

    places: Tensor
    """(orders, S x 128, 1) int64: the token of each slot, some token where it is empty."""
    occupied: Tensor
    """(S, 128) bool: the slot holds a token."""
    empty: Tensor
    """(S x 128, 1) bool: the slot holds none."""
    queries: Tensor
    """(S, 1) int64: number of queries in each block."""
    every_block: Tensor
    """(words,) int32: all key blocks, packed."""
    thresholds: Tensor
    """(H, densities - 1, fields) float32: `HeadThresholds` that route as each candidate."""
    rows: Tensor
    """(rows a block,) int64: rows of a block that are compared."""
    compared: Tensor
    """(1, S x 128) int32: number of each slot among the compared rows, `EMPTY` between them."""

    @classmethod
    def of(cls, call: MeasuredCall, order: TokenOrder) -> MeasuredBlocks:
        """Makes them on the device of the measurement; never waits for it."""
        tokens = _tokens(order, call.query_blocks)
        occupied = tokens[0] != EMPTY
        thresholds = _thresholds(call.candidates).repeat(call.q.shape[1], 1, 1)
        rows = rows_on(tokens.device, call.row_step)
        return cls(
            tokens.flatten(1).clamp_(min=0).long().unsqueeze(-1),
            occupied,
            ~occupied.view(-1, 1),
            occupied.sum(1, keepdim=True),
            pack(torch.ones_like(order.block_counts, dtype=torch.bool)),
            thresholds.to(call.q.device, non_blocking=True),
            rows,
            _compared(tokens, rows),
        )

    def compared_of(self, values: Tensor, dim: int) -> Tensor:
        """Rows that are compared, of values that are (S x 128) along `dim`."""
        by_block = values.unflatten(dim, self.occupied.shape)
        return by_block.index_select(dim + 1, self.rows).flatten(dim, dim + 1)


@dataclass(frozen=True, eq=False)
class MeasuredRows:
    """Measured query blocks in one token order."""

    q: Tensor
    """(B, H, S x rows a block, D): compared queries; 0 in empty slots."""
    means: Tensor
    """(B, H, candidates, S, channels) float32: mean query of each block, once for each candidate,
    padded as the kernels' are."""

    @classmethod
    def of(
        cls, call: MeasuredCall, blocks: MeasuredBlocks, order_kind: int, channels: int
    ) -> MeasuredRows:
        batch, heads, _, own = call.q.shape
        q = call.q.gather(2, blocks.places[order_kind].expand(batch, heads, -1, own))
        by_block = q.masked_fill_(blocks.empty, 0).unflatten(2, blocks.occupied.shape)
        means = by_block.sum(3, dtype=torch.float32).div_(blocks.queries)
        if own < channels:
            means = pad(means, (0, channels - own))
        dropping = len(call.candidates.densities) - 1
        for_each = means.unsqueeze(2).expand(-1, -1, dropping, -1, -1)
        return cls(blocks.compared_of(q, 2), for_each.contiguous())

    def of_heads(self, heads: slice) -> MeasuredRows:
        return MeasuredRows(self.q[:, heads], self.means[:, heads])


def _tokens(order: TokenOrder, blocks: Sequence[int]) -> Tensor:
    """(orders, S, 128) int32 tokens, -1 in empty slots. Selected one by one: an index tensor would
    come from the host and wait."""
    slots, missing = order.slot_tokens, -order.slots % QUERY_BLOCK
    if missing:
        slots = pad(slots, (0, missing), value=EMPTY)
    by_block = slots.unflatten(1, (-1, QUERY_BLOCK))
    return torch.stack([by_block[:, block] for block in blocks], 1)


def _compared(tokens: Tensor, rows: Tensor) -> Tensor:
    found = torch.full_like(tokens[0], EMPTY)
    count = found.shape[0] * rows.numel()
    places = torch.arange(count, dtype=found.dtype, device=found.device)
    return found.index_copy_(1, rows, places.view(-1, rows.numel())).view(1, -1)


def _thresholds(candidates: CandidateSet) -> Tensor:
    """(densities - 1, fields) on the CPU: one copy is cheaper than a launch for each number."""
    *densities, _ = candidates.densities
    table = threshold_table(
        len(densities),
        torch.device("cpu"),
        selection=1.0,
        simthreshd1=-torch.inf,
        pvthreshd=PV_FILTER_OFF,
        router=float(candidates.router),
    )
    table[:, SELECTION] = torch.tensor(densities, dtype=table.dtype, device="cpu")
    return table
