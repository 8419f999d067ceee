# SPDX-License-Identifier: Apache-2.0
"""Record of each forward pass, layer by layer: the material of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..stats import AttentionStats, Counter
from .run_time import Spans


@dataclass(eq=False)
class PassRecord:
    """Record of one pass, made where it begins, because its counters outlive the calls that add to
    them."""

    step: int
    rows: int
    stats: AttentionStats | None
    """Counters of the pass; None in a pass that cannot be sparse."""
    pairs: Tensor | None
    """(rows, counters) int64 on the device of the pass, as in `AttentionStats`."""
    spans: Spans
    """Times of its calls."""
    dense: set[int] = field(default_factory=set)
    """Rows of layers whose self-attention was dense."""

    @classmethod
    def begin(cls, step: int, rows: int, device: torch.device, may_be_sparse: bool) -> PassRecord:
        if not may_be_sparse:
            return cls(step, rows, None, None, Spans(device))
        pairs = torch.zeros(rows, len(Counter), dtype=torch.int64, device=device)
        return cls(step, rows, AttentionStats(device), pairs, Spans(device))

    def stats_of(self, row: int) -> AttentionStats:
        """Counters for a sparse call of a layer. Layers past the last row count there."""
        assert self.stats is not None and self.pairs is not None
        self.stats.counters = self.pairs[min(row, self.rows - 1)]
        return self.stats


@dataclass(frozen=True, eq=False)
class Densities:
    """Shares of the attention that was computed."""

    overall: float
    """Share in all sparse calls; 1 when there were none."""
    by_step: Tensor
    """(rows, steps) float32: 1 where calls were dense, NaN where none was made."""

    @property
    def layers(self) -> Tensor:
        """(layers,) int64: number of each layer with self-attention."""
        return (~self.by_step.isnan()).any(1).nonzero().flatten()

    @classmethod
    def of(cls, records: Sequence[PassRecord]) -> Densities:
        """Sums up records. Waits for the devices."""
        steps = max((record.step for record in records), default=-1) + 1
        rows = max((record.rows for record in records), default=0)
        pairs = torch.zeros(2, rows, steps, dtype=torch.int64)
        dense = torch.zeros(rows, steps, dtype=torch.bool)
        for record in records:
            if record.pairs is not None:
                counts = record.pairs.cpu().T
                pairs[:, : record.rows, record.step] += counts[[Counter.KEPT, Counter.VALID]]
            for row in tuple(record.dense):  # a pass on another device may be adding to it
                dense[min(row, rows - 1), record.step] = True
        kept, valid = pairs
        by_step = (kept / valid).where(valid > 0, torch.nan)
        total = int(valid.sum())
        return cls(
            int(kept.sum()) / total if total else 1.0,
            torch.where(by_step.isnan() & dense, 1.0, by_step),
        )
