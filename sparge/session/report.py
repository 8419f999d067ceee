# SPDX-License-Identifier: Apache-2.0
"""Report of a run. What calls add to it stays on their devices until the run is over."""

from __future__ import annotations

import math
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiling import being_recorded
from ..reasons import Reason
from ..stages.launches import raw_stream
from ..stats import AttentionStats
from ..stats import Counter as Pairs
from .calls import Call, Untracked
from .schedule import Aim
from .timing import Backend

#: Layers whose dense calls in a run's first step are exact, for the run to learn what that takes.
TIMED_LAYERS = (1, 2)
NO_CALLS = Reason("no attention call came", "no call")
#: Remark on results that are no numbers.
NAN_IN_SPARSE = Reason(
    "NaN in the results of sparse calls: see whether it stays when all calls are dense, as the "
    "model may give it by itself",
    "NaN found",
)


@dataclass
class Counts:
    """Counts of calls; several threads add to it where a run is split over GPUs."""

    sparse: int = 0
    cross: int = 0
    eight_bit: int = 0
    """Dense calls in 8 bits."""
    passes: int = 0
    tokens: int = 0
    family: str = ""
    filter_left_out: bool = False
    """Whether some sparse call ran without the PV filter that was asked for."""
    finished: int = 0
    """Passes that came to their end."""
    may_have_been_sparse: bool = False
    """Whether one of them may have been sparse, or nothing may in the whole run."""
    grid_tokens: int = 0
    """Most tokens that a clip had in a pass; 0 where that was never known."""
    reasons: Counter[Reason] = field(default_factory=Counter)
    """Reasons of dense self-attention calls."""
    tokens_of: dict[Reason, int] = field(default_factory=dict)
    """Most tokens of a call by its reason."""
    reached: bool = False
    """Whether a call of the clip's self-attention came, or no clip is known."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def dense(self) -> int:
        return self.reasons.total()

    @property
    def calls(self) -> int:
        return self.sparse + self.dense + self.cross

    @property
    def missing(self) -> bool:
        """Whether other calls came, and none of the clip's self-attention."""
        return bool(not self.reached and self.finished and self.calls)

    @property
    def main_reason(self) -> Reason | None:
        """Reason of the largest dense self-attention calls, of several the most frequent one."""
        found = self.reasons
        return max(found, key=lambda why: (self.tokens_of.get(why, 0), found[why]), default=None)

    def begin_pass(self, family: str, grid: tuple[int, int, int] | None) -> None:
        """Counts a forward pass. grid: tokens of the clip along (time, height, width)."""
        with self._lock:
            self.passes += 1
            self.family = family
            self.reached |= grid is None
            self.grid_tokens = max(self.grid_tokens, math.prod(grid) if grid else 0)

    def end_pass(self, may_be_sparse: bool) -> None:
        with self._lock:
            self.finished += 1
            self.may_have_been_sparse |= may_be_sparse

    def add_sparse(self, tokens: int, filter_left_out: bool) -> None:
        with self._lock:
            self.sparse += 1
            self.filter_left_out |= filter_left_out
            self.tokens = max(self.tokens, tokens)

    def add_dense(self, reason: Reason, tokens: int, by_eight_bit: bool) -> None:
        with self._lock:
            self.reasons[reason] += 1
            self.tokens_of[reason] = max(tokens, self.tokens_of.get(reason, 0))
            self.eight_bit += by_eight_bit
            self.tokens = max(self.tokens, tokens)

    def add_cross(self) -> None:
        with self._lock:
            self.cross += 1


class Span(NamedTuple):
    """Work of one call by a backend: between two marks of its stream."""

    backend: Backend
    key: tuple[tuple[int, ...], torch.device]
    """Shape of the queries: calls alike in it take alike."""
    foretold: float | None
    """Seconds of exact attention by `timing`."""
    start: Any
    end: Any

    @property
    def seconds(self) -> float:
        """Waits for the GPU."""
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1000


@dataclass(eq=False)
class PassRecord:
    """Record of one pass. Its counters are made where it begins, for they outlive the calls that
    add to them."""

    step: int
    device: torch.device
    untracked: Untracked = nullcontext
    """Context around allocations in a call, as in `Session`."""
    looked_at: int | None = None
    """Row whose sparse result is looked at; None for that of the first sparse call."""
    stats: AttentionStats | None = None
    pairs: Tensor | None = None
    """(rows, counters) int64 on the device, as in `AttentionStats`; None in a dense pass."""
    dense: Counter[int | None] = field(default_factory=Counter)
    """Query-key pairs of dense self-attention calls by row; those of None are of no layer of the
    clip, such as of text or sound beside it."""
    spans: list[Span] = field(default_factory=list)
    last_row: int | None = None
    """Row of the last sparse call or, before there is one, of the last dense one."""
    _has_sparse: bool = field(default=False, repr=False)
    _nan: Tensor | None = field(default=None, repr=False)  # () bool: whether NaN came
    _streams: dict[int, Any] = field(default_factory=dict, repr=False)  # by their handles

    def expect(self, rows: int) -> None:
        """Makes the counters of a pass that may be sparse."""
        self.stats = AttentionStats(self.device)
        self.pairs = torch.zeros(rows, len(Pairs), dtype=torch.int64, device=self.device)

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
        rows = self.pairs.shape[0]
        if (missing := row + 1 - rows) > 0:
            with self.untracked():
                more = self.pairs.new_zeros(max(missing, rows), len(Pairs))
                self.pairs = torch.cat([self.pairs, more])
        self.stats.counters = self.pairs[row]
        return self.stats

    def look(self, row: int, out: Tensor) -> None:
        """Looks for NaN, which an infinity makes too, in one sparse result of the pass. Never
        waits.

        Layers and steps hand them on, so the last layer has what came before it: a look at each
        would take longer and tell no more.
        """
        if self._nan is not None or self.looked_at not in (None, row):
            return
        if not being_recorded(out.device):
            with suppress(torch.OutOfMemoryError), self.untracked():
                self._nan = out.amax().isnan()

    @property
    def has_nan(self) -> bool:
        """Whether NaN stands in the result that was looked at. Waits for the device."""
        return self._nan is not None and bool(self._nan)

    def can_time(self, call: Call) -> bool:
        """Whether a call is timed: a self-attention on a GPU that no CUDA graph records."""
        if self.device.type != "cuda" or call.key_tokens != call.query_tokens:
            return False
        return not being_recorded(self.device)

    def mark(self) -> Any:
        """Mark in the device's current stream. Torch takes ten times as long to give that as its
        handle."""
        handle = raw_stream(self.device.index)
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.current_stream(self.device)
        made = torch.cuda.Event(enable_timing=True)
        made.record(self._streams[handle])
        return made

    def learns_exact_time(self, row: int | None, call: Call) -> bool:
        """Whether a dense call is computed exactly so that the run learns what that takes: in the
        first step, of two layers."""
        return self.step == 0 and row in TIMED_LAYERS and self.can_time(call)

    def timed(
        self, backend: Backend, call: Call, foretold: float | None = None
    ) -> AbstractContextManager[None]:
        """Context around work for a call, where it is timed."""
        return Timed(self, backend, call, foretold) if self.can_time(call) else _UNTIMED


_UNTIMED = nullcontext()


class Timed:
    """Context around work of a call, between two marks of the stream; not of what raises."""

    def __init__(
        self, record: PassRecord, backend: Backend, call: Call, foretold: float | None
    ) -> None:
        self._record = record
        key = call.q.shape, record.device
        self._span_to = partial(Span, backend, key, foretold, record.mark())

    def __enter__(self) -> None:
        """Begins where it was made."""

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self._record.spans.append(self._span_to(self._record.mark()))


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
    """(layers, steps) float32: likewise of each layer with self-attention."""
    layers: Tensor
    """(layers,) int64: their numbers."""

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
                sparse[:, : counts.shape[1], record.step] += counts[[Pairs.KEPT, Pairs.VALID]]
            for row, pairs in record.dense.copy().items():  # another thread may be adding to it
                dense[of_no_layer if row is None else row, record.step] += pairs
        every = sparse + dense
        overall, of_sparse_calls = (x.sum((1, 2), keepdim=True) for x in (every, sparse))
        by_step = _shares(every[:, :of_no_layer]).float()
        layers = (~by_step.isnan()).any(1).nonzero().flatten()
        return cls(
            float(_shares(overall).nan_to_num(1.0)),
            float(_shares(of_sparse_calls).nan_to_num(1.0)),
            _shares(every.sum(1)).float(),
            by_step[layers],
            layers,
        )


def _shares(pairs: Tensor) -> Tensor:
    """Float64 shares of (2, ...) pairs that were computed, and all; NaN of none."""
    computed, every = pairs.double()
    return computed / every


@dataclass(frozen=True)
class RunTime:
    """Seconds of the attention of a run."""

    by_step: Mapping[int, Mapping[Backend, float]]
    saved: float | None
    """Seconds that exact attention would have taken more than this run's, with all measuring; None
    where nothing says what that takes."""

    @classmethod
    def of(cls, records: Sequence[PassRecord]) -> RunTime:
        """Adds up the work of passes. Waits for the GPU."""
        by_step: dict[int, dict[Backend, float]] = defaultdict(lambda: defaultdict(float))
        timed = [(record.step, span, span.seconds) for record in records for span in record.spans]
        exact: dict[Any, list[float]] = defaultdict(list)
        for step, span, seconds in timed:
            by_step[step][span.backend] += seconds
            if span.backend is Backend.EXACT:
                exact[span.key].append(seconds)
        # Of two the lesser, as the first call of a run loads kernels.
        usual = {key: statistics.median_low(found) for key, found in exact.items()}
        saved, known = 0.0, False
        for _, span, seconds in timed:
            if span.backend is Backend.MEASURING:
                saved -= seconds
            elif span.backend is not Backend.EXACT:
                would = usual.get(span.key, span.foretold)
                if would is None:
                    return cls(by_step, None)
                saved, known = saved + would - seconds, True
        return cls(by_step, saved if known else None)

    def line(self) -> str:
        """Attention seconds by backend, in the run and by step; empty without any."""
        parts = []
        for backend in Backend:
            of_steps = [of_step.get(backend, 0.0) for _, of_step in sorted(self.by_step.items())]
            if any(of_steps):
                by_step = " ".join(f"{seconds:.2g}" for seconds in of_steps)
                parts.append(f"{backend.value} {sum(of_steps):.3g} ({by_step})")
        return f"Seconds of attention, in all and by step: {'; '.join(parts)}." if parts else ""


@dataclass(frozen=True, eq=False)
class MeasuredHeads:
    """Heads of the calls of one shape. Tensors are (layers, heads) float32 of the layers that were
    sparse, on the CPU."""

    tokens: int
    layers: Sequence[int]
    density: Tensor
    """Share of pairs that was kept, forced blocks included: the mean over the sparse steps."""
    expected: Tensor
    """Relative L2 error expected when the settings were made, likewise."""
    found: Tensor
    """Relative L2 error that sparse calls made, where they were measured again; NaN elsewhere."""
    weight: Tensor
    """Head weights."""

    def lines(self) -> Iterator[str]:
        """Lines of the layers, below a line that names their columns."""
        yield f"{self.tokens:,} tokens: layer, density (least to most), error expected, found"
        for index, layer in enumerate(self.layers):
            density = self.density[index]
            errors = (mean_error(x[index], self.weight[index]) for x in (self.expected, self.found))
            shown = ("-" if error is None else f"{error:.3f}" for error in errors)
            yield (
                f"{layer:4d}  {percent(density.mean())} ({percent(density.min())} to "
                f"{percent(density.max())})  {'  '.join(shown)}"
            )


@dataclass(frozen=True, eq=False)
class Report:
    """Report of one run when it is over: nothing of the model."""

    counts: Counts
    aim: Aim | None
    densities: Densities
    heads: tuple[MeasuredHeads, ...]
    """Measured heads, one entry for each shape of calls."""
    time: RunTime
    no_calls: Reason = NO_CALLS
    stopped: bool = False
    notes: tuple[Reason, ...] = ()
    steps: int = 0
    """Number of steps of the schedule; 0 where that is not known."""
    seconds: float = 0.0
    """Seconds of the run from its first pass on; 0 where none came."""

    @property
    def sparse_calls(self) -> int:
        return self.counts.sparse

    @property
    def dense_calls(self) -> int:
        return self.counts.dense

    @property
    def reasons(self) -> Counter[Reason]:
        return self.counts.reasons

    @property
    def density(self) -> float:
        return self.densities.of_sparse_calls

    @property
    def stopped_early(self) -> bool:
        """Whether an error or the user stopped it before a pass that may be sparse was over."""
        return self.stopped and not self.counts.sparse and not self.counts.may_have_been_sparse

    def of_heads(self, name: str) -> Tensor:
        """(heads of all shapes and layers,) of one tensor of `MeasuredHeads`, without NaN."""
        joined = self._joined(name)
        return joined[~joined.isnan()]

    @cached_property
    def error(self) -> float | None:
        """Mean error of sparse calls over heads by their weights: what was found or, where nothing
        was, what was expected. None where no head is measured."""
        found, weight = self._joined("found"), self._joined("weight")
        of_found = mean_error(found, weight)
        return mean_error(self._joined("expected"), weight) if of_found is None else of_found

    def _joined(self, name: str) -> Tensor:
        values = [getattr(shape, name).flatten() for shape in self.heads]
        return torch.cat(values) if values else torch.empty(0, device="cpu")

    def __str__(self) -> str:
        wanted = f", for {self.aim}" if self.aim else ""
        found = self.densities
        sparse = f"sparse calls kept {found.of_sparse_calls:.1%} of their pairs{wanted}"
        if not self.sparse_calls:
            sparse = "no call was sparse"
        lines = [f"{found.overall:.1%} of attention was computed; {sparse}."]
        lines += [f"{note.rstrip('.')}." for note in self.notes]
        for reason, count in self.counts.reasons.most_common():
            lines.append(f"{count} calls were dense: {reason.rstrip('.')}.")
        return "\n".join(lines)

    def details(self) -> Iterator[str]:
        """Lines on what was asked for and on what each step and each layer did.

        Densities of steps are 100 % where all calls were dense, - where none came.
        """
        if self.aim is not None:
            yield f"Asked for {self.aim}."
        if of_steps := self.densities.of_steps.tolist():
            shares = ("-" if math.isnan(share) else f"{100 * share:.0f}" for share in of_steps)
            yield f"Density by step, %: {' '.join(shares)}."
        if line := self.time.line():
            yield line
        for shape in self.heads:
            yield from shape.lines()


def mean_error(errors: Tensor, weight: Tensor) -> float | None:
    """Mean error over the heads whose error is known (no NaN), each by its weight: what a target is
    of. None where no such head counts."""
    known = ~errors.isnan()
    counts = weight[known].double()
    total = float(counts.sum())
    return float((errors[known] * counts).sum()) / total if total > 0 else None


def percent(share: Tensor) -> str:
    return f"{100 * float(share):.1f} %"
