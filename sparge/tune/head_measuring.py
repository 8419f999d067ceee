# SPDX-License-Identifier: Apache-2.0
"""Measuring of heads while their calls are dense, until they are chosen from what was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ..errors import Unsupported
from .aim import Aim
from .call import Call, DenseOnce
from .facts import PassFacts, Place
from .finite_rows import OF_MODEL, FiniteRows
from .kernel_measure import measure_for
from .measurement import Measurement
from .records import Untracked
from .schedule import MeasuringSchedule
from .step_settings import StepSettings
from .ways import Choice, RunLength, Ways
from .workload import Workload

NOT_MEASURED = "this layer could not be measured"
NO_MEMORY = "not enough memory to measure this layer"
TOO_SHORT = "too few steps are left to pay for measuring"
#: Measuring, or sparse computation, raised an error.
FAILED = "an error of Sparge Attention (see the log)"


class HeadMeasuring:
    """Measuring of the heads of one table. Rows are those of the table: layers."""

    def __init__(
        self,
        rows: int,
        heads: int,
        least: float,
        workload: Workload,
        device: torch.device,
        ways: Ways,
        run: RunLength,
        untracked: Untracked,
    ) -> None:
        """least: share of pairs that is always kept."""
        self.rows, self.heads, self.device = rows, heads, device
        self.why_dense: str | None = None
        """Reason why no row is measured any more."""
        self.one_order = False
        """Heads were measured in one way through the tokens: more would have cost too much."""
        self.not_finite: dict[int, str] = {}
        """Rows whose dense results were not finite, with the reason why they stay dense."""
        self.measured_rows: set[int] = set()
        self._least, self._workload = least, workload
        self._ways, self._run, self._untracked = ways, run, untracked
        self._measurement: Measurement | None = None
        self._finite: FiniteRows | None = None
        self._schedule = MeasuringSchedule()
        self._batch_entries = 1  # entries in the batch of the running pass
        self._is_settled = False  # how much is measured
        self._again = 0  # times that heads are measured again
        self._called: set[int] = set()  # rows of dense calls
        self._refusals: dict[int, str] = {}

    def refusal(self, row: int) -> str | None:
        """Reason why a layer cannot be measured whatever comes, or None."""
        return self.why_dense or self._refusals.get(row)

    def is_done(self, facts: PassFacts) -> bool:
        """Whether enough is known for a sparse pass with these facts."""
        return self._schedule.is_done(facts.conditioning, self._missed)

    def is_done_early(self, facts: PassFacts) -> bool:
        """Whether enough is known when a dense pass with these facts ends."""
        is_dense = facts.why_dense is not None and facts.is_last_dense
        found = self._measurement is not None and self._schedule.is_complete
        return is_dense and found and not self._missed

    @property
    def _missed(self) -> bool:
        """Whether layers made dense calls, but none that was measured."""
        return bool(self._called - self.measured_rows - self._refusals.keys())

    def begin_pass(self, facts: PassFacts) -> None:
        """Begins a pass whose heads are not chosen."""
        self._batch_entries = len(facts.conditioning)
        may_be_sparse = facts.why_dense is None
        self._schedule.begin_pass(facts.conditioning, may_be_sparse, facts.is_last_dense)
        if self._measurement is not None or not self._schedule.measuring:
            return
        try:
            self._measurement = Measurement.begin(
                layers=self.rows,
                heads=self.heads,
                workload=self._workload,
                measure=measure_for(self.device),
                device=self.device,
            )
            self._finite = FiniteRows()
        except ValueError as nothing_to_drop:
            self.why_dense = str(nothing_to_drop)

    def measure(
        self, row: int, call: Call, choice: Choice, dense: DenseOnce, timed: Untracked = nullcontext
    ) -> None:
        """Inside a dense call: measures it if its pass is to be, and if it may ever be faster
        sparse. Never waits. choice: for calls like this. timed: context around the measurement
        alone."""
        if row in self._refusals:
            return
        if self._least >= choice.break_even[False]:
            self._refusals[row] = choice.why_slower(pools=False)
            return
        self._called.add(row)
        if self._measurement is None or not self._schedule.measuring:
            return
        calls = self._schedule.calls_a_measurement
        if not self._is_settled:
            self._settle(self._measurement, call)
        if self.why_dense is not None:
            return
        # Errors raised here have nothing to do with measuring.
        out = dense.result()
        try:
            with self._untracked(), timed():
                if self._finite is not None:
                    self._finite.look(row, call.result_heads_first(out))
                for qkv in entries(call, self._schedule.measuring, self._batch_entries):
                    self._measurement.add(row, *qkv, scale=call.scale, calls=calls)
        except Unsupported as refusal:
            self._refusals[row] = refusal.reason
        except torch.OutOfMemoryError:  # the dense call may fit all the same
            self._refusals[row] = NO_MEMORY
        except Exception:
            self._refusals[row] = FAILED  # once is enough
            raise
        else:
            self.measured_rows.add(row)
            self._schedule.measured()

    def _settle(self, measurement: Measurement, call: Call) -> None:
        """Once: layers and conditionings compare only where all measure the same token orders."""
        most, schedule = len(measurement.order_kinds[0]), self._schedule
        afforded = self._ways.affordable(
            call,
            most,
            run=self._run,
            conditionings=schedule.measurements_a_layer,
            calls=schedule.calls_a_measurement,
            least=self._least,
        )
        self._is_settled = True
        if not afforded.pays:
            self.why_dense, self._measurement, self._finite = TOO_SHORT, None, None
            return
        self.one_order, self._again = afforded.order_kinds < most, afforded.again
        if self.one_order:
            measurement.measure_one_order()

    def choose(self, aim: Aim, place: Place | None) -> StepSettings | None:
        """Settings from what was measured so far; None where no layer gave finite numbers. Waits
        for the GPU. place: of the first step that they are for."""
        assert self._measurement is not None  # without one nothing was measured
        steps = place.steps - place.index if place else self._run.sparse_steps
        try:
            chosen = StepSettings(aim, steps, measurement=self._measurement, again=self._again)
        except ValueError:
            chosen = None
        self._measurement = None  # after an interrupt it is there for another try
        if chosen is None:
            self.find_not_finite()
            self.why_dense = next(iter(self.not_finite.values()), NOT_MEASURED)
        return chosen

    def find_not_finite(self) -> None:
        """Once measuring has ended, finds the rows that were not finite. Waits for the GPU."""
        if self._finite is not None and self._measurement is None:
            found, self._finite = self._finite.not_finite(), None
            self.not_finite = {row: OF_MODEL.format(what=what) for row, what in found.items()}


def entries(call: Call, places: Sequence[int], batch_entries: int) -> Iterator[tuple[Tensor, ...]]:
    """Yields q, k and v of the entries of a batch in these places: they count one by one, as if the
    host had not put them into one batch of `batch_entries`. A batch that others made counts as
    one."""
    rows, others = divmod(call.q.shape[0], batch_entries)
    if others:
        yield call.qkv
        return
    for place in places:
        yield tuple(x[place * rows : (place + 1) * rows] for x in call.qkv)
