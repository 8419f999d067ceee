# SPDX-License-Identifier: Apache-2.0
"""State of one sampling run. It is made when the run starts and dropped at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from ..common.failures import Failures
from ..kernels import capabilities
from ..speed import Backend, known_table, speed_table
from ..speed.self_test import WrongKernels
from ..tune import Session, SigmaWindow, Tally
from ..tune.records import Untracked
from ..tune.report import NAN_IN_SPARSE
from ..tune.ways import SpeedOf, speed_matters
from .layout import TokenLayout
from .result import RunResult
from .settings import Settings
from .words import HostWords


class Run:
    """State of one run, shared by its forward passes on every device."""

    def __init__(
        self,
        settings: Settings,
        window: SigmaWindow,
        schedule: Sequence[float],
        *,
        backend: Backend,
        words: HostWords,
        untracked: Untracked = nullcontext,
        speed: SpeedOf | None = None,
    ) -> None:
        """Starts a run. window, schedule: noise levels that may be sparse, and that of each step,
        as far as they are known. backend: what serves the host's exact calls.
        untracked: as in `Session`, and speed, which asks for what this process knows by default."""
        self.settings = settings
        self.asked = settings.policy()
        """Policy for any device; `sparge.tune.fitted` makes it one's own."""
        self.window, self.schedule = window, schedule
        self.backend = backend
        self.tally = Tally()
        self._notes: dict[str, None] = {}
        # Not a method: the run's tables hold it, and with the run they would stay on their devices
        # until the cycle is found.
        self.note: Callable[[str], None] = self._notes.setdefault
        """Adds a remark to the report, once."""
        self.failures = Failures()
        self.session = Session(
            settings.aim,
            dense_steps=window.dense_steps(schedule),
            sparse_steps=window.sparse_steps(schedule),
            untracked=untracked,
            speed=speed or partial(known_table, backend=backend),
            exact_dense=settings.exact_dense,
        )
        self._began: float | None = None
        self._ended: float | None = None
        self._words = words
        self._unusable: dict[torch.device, str] = {}

    @property
    def notes(self) -> list[str]:
        return list(self._notes)

    def meet(self, layout: TokenLayout, device: torch.device) -> str | None:
        """Takes note of a pass that begins. Returns the reason why no call on its device can be
        sparse, if there is one. The clock starts at the first pass: kernels and model are there."""
        self.tally.add_forward(layout.family, layout.grid)
        self._began = self._began or time.perf_counter()
        self.note_missing_layers(layout.blocks)
        unusable = self.unusable(device)
        if unusable is None and (slower_target := capabilities(device).note):
            self.note(slower_target)
        return unusable

    def stop_clock(self) -> None:
        """Stops the clock, where the host knows that no pass is to come, or later than it does."""
        self._ended = time.perf_counter()

    def await_kernels(self, device: torch.device, wait: Callable[[], str | None]) -> None:
        """Waits for the kernels, so that whether a call is sparse never depends on how fast a
        compiler was, and measures the speed of the GPU where that is not known. wait: returns why
        there are none, or None."""
        failure = wait()
        if failure is not None:
            self.give_up(device, failure)
            return
        with self.failures.caught("the speed of this GPU was not measured"):
            try:
                speed_table(device, self.backend)
            except WrongKernels as error:
                self.give_up(device, error.reason)

    def note_missing_layers(self, total: int | None) -> None:
        """Notes what dense_blocks asks in vain of a model of so many layers."""
        spans = self.settings.dense_layers
        if total is None and spans.needs_total:
            self.note("negative dense_blocks do nothing: this model's block count is unknown")
        if total is not None and (missing := spans.missing(total)):
            numbers = ", ".join(map(str, missing))
            self.note(f"dense_blocks names {numbers}; this model has blocks 0-{total - 1}")

    def unusable(self, device: torch.device) -> str | None:
        """Reason why attention on this device stays dense for the whole run, or None."""
        return self._unusable.get(device) or unusable_reason(device)

    def give_up(self, device: torch.device, reason: str) -> None:
        """Keeps the rest of the run dense on this device."""
        self._unusable.setdefault(device, reason)

    def result(self, stopped: bool) -> RunResult:
        """Result of the run when it is over. Waits for the GPU."""
        report = self.session.report()
        ended = self._ended or time.perf_counter()
        notes = [NAN_IN_SPARSE] if report.has_nan else []
        return RunResult(
            self.tally,
            report,
            stopped,
            (*notes, *self.notes),
            len(self.schedule),
            0.0 if self._began is None else ended - self._began,
            self._words,
        )


def unusable_reason(device: torch.device) -> str | None:
    """Reason why the kernels cannot run on this device, or None when they can."""
    if not speed_matters():
        return None
    capability = capabilities(device)
    return None if capability.usable else capability.reason
