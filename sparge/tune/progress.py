# SPDX-License-Identifier: Apache-2.0
"""Line while a run goes on: its step, seconds a step, and what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .window import SAME_SIGMA


class Progress:
    """Progress of one run by noise levels: samplers may evaluate the model more than once a
    step."""

    def __init__(
        self,
        schedule: Sequence[float],
        show: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """schedule: noise level of each step; nothing is shown where that is not known. show: takes
        the line."""
        self._schedule, self._show, self._clock = schedule, show, clock
        self._step, self._since = -1, 0.0

    def at(self, sigma: float) -> None:
        """Notes that a pass begins at this noise level."""
        step = sum(level >= sigma * (1 - SAME_SIGMA) for level in self._schedule) - 1
        if step <= self._step:
            return
        before, since = self._step, self._since
        self._step, self._since = step, self._clock()
        if before >= 0:
            seconds, steps = (self._since - since) / (step - before), len(self._schedule)
            left = seconds * (steps - step)
            self._show(
                f"Step {step + 1} of {steps}: {seconds:.1f} s a step, about {left:.0f} s left"
            )
