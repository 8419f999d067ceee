# SPDX-License-Identifier: Apache-2.0
"""Record of each forward pass, the material of the report: what each layer computed, and how long
calls took by the ways to compute them. Nothing waits for either before the run is over."""

from __future__ import annotations

import enum
import statistics
from collections import Counter as Multiset
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..order.recording import being_recorded
from ..speed.table import Size
from ..stats import AttentionStats, Counter
from .call import Call
from .finite_rows import FiniteRows

#: Context around allocations that other calls of a layer do without.
Untracked = Callable[[], AbstractContextManager[None]]


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
    stats: AttentionStats | None
    """Counters of the pass; None in a pass that cannot be sparse."""
    pairs: Tensor | None
    """(rows, counters) int64 on the device of the pass, as in `AttentionStats`."""
    spans: Spans
    """Times of its calls."""
    untracked: Untracked = nullcontext
    """As in `Session`."""
    looked_at: int | None = None
    """Row whose sparse result is looked at; None for that of the first sparse call."""
    dense: Multiset[int | None] = field(default_factory=Multiset)
    """Query-key pairs of dense self-attention calls by row; those of None are of no layer of the
    clip, such as of text or sound beside it."""
    finite: FiniteRows = field(default_factory=FiniteRows)
    """Sparse results that were looked at."""
    last_row: int | None = None
    """Row of the last sparse call or, before there is one, of the last dense one."""
    _has_sparse: bool = field(default=False, repr=False)

    @classmethod
    def begin(
        cls,
        step: int,
        rows: int,
        device: torch.device,
        may_be_sparse: bool,
        untracked: Untracked = nullcontext,
        looked_at: int | None = None,
    ) -> PassRecord:
        """rows: number of those that are expected."""
        stats = pairs = None
        if may_be_sparse:
            stats = AttentionStats(device)
            pairs = torch.zeros(rows, len(Counter), dtype=torch.int64, device=device)
        return cls(step, stats, pairs, Spans(device), untracked, looked_at)

    @property
    def rows(self) -> int:
        """Number of rows that may hold something."""
        rows = (row + 1 for row in self.dense.copy() if row is not None)
        return max(0 if self.pairs is None else len(self.pairs), *rows, 0)

    def add_dense(self, row: int | None, pairs: int) -> None:
        """Counts a dense self-attention call. row: as in `dense`."""
        self.dense[row] += pairs
        if row is not None and not self._has_sparse:
            self.last_row = row

    def stats_of(self, row: int) -> AttentionStats:
        """Counters for a sparse call of a layer. Allocates for more rows than were expected."""
        assert self.stats is not None and self.pairs is not None
        self.last_row, self._has_sparse = row, True
        if (missing := row + 1 - len(self.pairs)) > 0:
            with self.untracked():
                more = self.pairs.new_zeros(max(missing, len(self.pairs)), len(Counter))
                self.pairs = torch.cat([self.pairs, more])
        self.stats.counters = self.pairs[row]
        return self.stats

    def look(self, row: int, out: Tensor) -> None:
        """Looks for NaN and inf in one sparse result of the pass. Never waits.

        Layers and steps hand them on, so the last layer has what came before it: a look at each
        would take longer and tell no more.
        """
        if self.finite or self.looked_at not in (None, row) or being_recorded(out.device):
            return
        with self.untracked():
            self.finite.look(row, out)


@dataclass(frozen=True, eq=False)
class Densities:
    """Shares of the query-key pairs that self-attention calls computed: dense calls all of theirs,
    sparse ones what they kept."""

    overall: float
    """Share in the whole run, what users are told; 1 when no call came."""
    of_sparse_calls: float
    """Share in its sparse calls, what a budget is of; 1 when there were none."""
    of_steps: Tensor
    """(steps,) float32: share in each step, NaN where no call came."""
    by_step: Tensor
    """(rows, steps) float32: likewise of each layer."""

    @property
    def layers(self) -> Tensor:
        """(layers,) int64: number of each layer with self-attention."""
        return (~self.by_step.isnan()).any(1).nonzero().flatten()

    @classmethod
    def of(cls, records: Sequence[PassRecord]) -> Densities:
        """Sums up records. Waits for the devices."""
        steps = max((record.step for record in records), default=-1) + 1
        rows = max((record.rows for record in records), default=0)
        of_no_layer = rows
        # Of each row, and of no layer: pairs that were computed, and all.
        sparse = torch.zeros(2, rows + 1, steps, dtype=torch.int64, device="cpu")
        dense = torch.zeros_like(sparse[0])
        for record in records:
            if record.pairs is not None:
                counts = record.pairs.cpu().T
                sparse[:, : counts.shape[1], record.step] += counts[[Counter.KEPT, Counter.VALID]]
            for row, pairs in record.dense.copy().items():  # another thread may be adding to it
                dense[of_no_layer if row is None else row, record.step] += pairs
        every = sparse + dense
        overall, of_sparse_calls = (x.sum((1, 2), keepdim=True) for x in (every, sparse))
        return cls(
            float(_shares(overall).nan_to_num(1.0)),
            float(_shares(of_sparse_calls).nan_to_num(1.0)),
            _shares(every.sum(1)).float(),
            _shares(every[:, :of_no_layer]).float(),
        )


def _shares(pairs: Tensor) -> Tensor:
    """Float64 shares of (2, ...) pairs that were computed, and all; NaN of none."""
    computed, every = pairs.double()
    return computed / every


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
