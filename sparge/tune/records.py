# SPDX-License-Identifier: Apache-2.0
"""Record of each forward pass, the material of the report: what each layer computed, and how long
calls took by the ways to compute them. Nothing waits for either before the run is over."""

from __future__ import annotations

import enum
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..order.recording import being_recorded
from ..speed.table import Size
from ..stats import AttentionStats, Counter
from .call import Call


class Way(enum.Enum):
    EXACT = "exact"
    EIGHT_BIT = "8-bit dense"
    SPARSE = "sparse"
    MEASURING = "measuring"


@dataclass(frozen=True, eq=False)
class Span:
    """Work of one call: between two marks of its stream."""

    way: Way
    key: tuple[Size, torch.device]
    foretold: float | None
    """Seconds of exact attention by the speed table."""
    start: Any
    end: Any

    @property
    def seconds(self) -> float:
        """Waits for the GPU."""
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1000


@dataclass(eq=False)
class Spans:
    """Work of one pass on a GPU; that on other devices is not timed."""

    device: torch.device
    spans: list[Span] = field(default_factory=list)

    def times(self, call: Call) -> bool:
        """Whether a call is timed: a self-attention on a GPU that no CUDA graph records."""
        whole = call.k.shape[2] == call.query_tokens
        return self.device.type == "cuda" and whole and not being_recorded(self.device)

    @contextmanager
    def around(self, way: Way, call: Call, foretold: float | None) -> Iterator[None]:
        """Context around work for a call, where it is timed. What raises is not counted."""
        if not self.times(call):
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        yield
        end.record(stream)
        self.spans.append(Span(way, (call.size, self.device), foretold, start, end))


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
        pairs = torch.zeros(2, rows, steps, dtype=torch.int64, device="cpu")
        dense = torch.zeros(rows, steps, dtype=torch.bool, device="cpu")
        for record in records:
            if record.pairs is not None:
                counts = record.pairs.cpu().T
                pairs[:, : record.rows, record.step] += counts[[Counter.KEPT, Counter.VALID]]
            for row in tuple(record.dense):  # a pass on another device may be adding to it
                dense[min(row, rows - 1), record.step] = True
        kept, valid = pairs
        by_step = (kept.to(torch.float32) / valid).where(valid > 0, torch.nan)
        total = int(valid.sum())
        return cls(
            int(kept.sum()) / total if total else 1.0,
            torch.where(by_step.isnan() & dense, 1.0, by_step),
        )


@dataclass(frozen=True)
class RunTime:
    """Seconds of the attention of a run."""

    by_step: Mapping[int, Mapping[Way, float]]
    saved: float | None
    """Seconds that exact attention would have taken more than this run's, with all measuring; None
    where nothing says what that takes."""
    by_table: bool
    """Whether the speed table said it for some calls, and not exact calls of this run for all."""

    @classmethod
    def of(cls, passes: Sequence[tuple[int, Spans]]) -> RunTime:
        """Adds up the work of (step, work) of each pass. Waits for the GPU."""
        by_step: dict[int, dict[Way, float]] = defaultdict(lambda: defaultdict(float))
        timed = [(step, span, span.seconds) for step, spans in passes for span in spans.spans]
        exact: dict[tuple[Size, torch.device], list[float]] = defaultdict(list)
        for step, span, seconds in timed:
            by_step[step][span.way] += seconds
            if span.way is Way.EXACT:
                exact[span.key].append(seconds)
        # Of two the lesser, as the first call of a run loads kernels.
        usual = {key: statistics.median_low(found) for key, found in exact.items()}
        saved, known, by_table = 0.0, False, False
        for _, span, seconds in timed:
            if span.way is Way.MEASURING:
                saved -= seconds
            elif span.way is not Way.EXACT:
                would = usual.get(span.key, span.foretold)
                if would is None:
                    return cls(by_step, None, True)
                by_table |= span.key not in usual
                saved, known = saved + would - seconds, True
        return cls(by_step, saved if known else None, by_table)

    def line(self) -> str:
        """Attention seconds of each way, in the run and by step; empty without any."""
        ways = [way for way in Way if any(way in of_step for of_step in self.by_step.values())]
        parts = []
        for way in ways:
            of_steps = [of_step.get(way, 0.0) for _, of_step in sorted(self.by_step.items())]
            by_step = " ".join(f"{seconds:.2g}" for seconds in of_steps)
            parts.append(f"{way.value} {sum(of_steps):.3g} ({by_step})")
        return f"Seconds of attention, in all and by step: {'; '.join(parts)}." if parts else ""
