# SPDX-License-Identifier: Apache-2.0
"""Costs of measuring the heads in a run of the node, and of choosing for them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

#: Seconds that a piece of work took, asked for when the run is over.
Seconds = Callable[[], float]


class HeadCosts:
    """Notes of these costs by model call, made once for all runs of a process: `begin` starts a
    run.

    A measurement only queues work, so it lies between two events of the GPU: its time is the host's
    where that is longer. Choices wait for the GPU, so they are timed by the clock, after the GPU
    has finished what came before.
    """

    def __init__(self, device: torch.device, calibration: type, choices: type) -> None:
        """Takes the pack's own `Calibration` and `StepChoices`."""
        self._device = device
        self._call: Callable[[], int] = lambda: 0
        self._samples: list[tuple[int, Seconds]] = []
        self._choices: list[tuple[int, Seconds]] = []
        self._watch(calibration, "sample", lambda: self._samples, waits=False)
        for name in ("__init__", "choose_anew", "at"):  # head settings are worked out by `at`
            self._watch(choices, name, lambda: self._choices, waits=True)

    def begin(self, call: Callable[[], int]) -> None:
        """Starts a run. call: says the number of the model call that is under way, or comes
        next.
        """
        self._call, self._samples, self._choices = call, [], []

    def of_calls(self, calls: int) -> dict[str, list[float]]:
        """Seconds in each of so many model calls. Waits for the GPU."""
        synchronize(self._device)
        return {
            "calibration_s": _sums(self._samples, calls),
            "choosing_s": _sums(self._choices, calls),
        }

    def _watch(
        self, owner: type, name: str, notes: Callable[[], list[tuple[int, Seconds]]], *, waits: bool
    ) -> None:
        given = getattr(owner, name)

        @functools.wraps(given)
        def watched(*args: Any, **named: Any) -> Any:
            if waits:
                synchronize(self._device)
            watch = GpuWatch() if self._device.type == "cuda" and not waits else Stopwatch()
            try:
                return given(*args, **named)
            finally:
                notes().append((self._call(), watch.stop()))

        setattr(owner, name, watched)


class Stopwatch:
    def __init__(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> Seconds:
        seconds = time.perf_counter() - self._started
        return lambda: seconds


class GpuWatch:
    """Stopwatch of the current stream."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def stop(self) -> Seconds:
        self._end.record()
        return lambda: self._start.elapsed_time(self._end) / 1000


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sums(notes: list[tuple[int, Seconds]], calls: int) -> list[float]:
    sums = [0.0] * calls
    for call, seconds in notes:
        sums[min(call, calls - 1)] += seconds()
    return [round(seconds, 5) for seconds in sums]
