# SPDX-License-Identifier: Apache-2.0
"""Time of each stage of a call, by events around every launch of our kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sparge.kernels.spec import HOPPER_ENTRIES
from sparge.stages import launch

from .timing import gpu_sleep

Launched = Callable[[str, Callable[[], None]], None]

ATTEND = "attend"
HEAD_START = 2.0  # ms, in which the host queues a call of a few launches


@dataclass(frozen=True)
class Mark:
    stage: str
    start: Any
    end: Any


@dataclass(frozen=True)
class Watched:
    """Substitute for a kernel: `launched` is called with its stage and the launch, which it
    makes.
    """

    kernel: Any
    stage: str
    launched: Launched

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def launch(self, *arguments: Any, **named: Any) -> None:
        self.launched(self.stage, partial(self.kernel.launch, *arguments, **named))


def stage_ms(work: Callable[[], object], calls: int) -> dict[str, float]:
    """Median milliseconds of each stage over some calls; launches of one stage are added up.

    The GPU sleeps before each call, so that every launch is queued before its turn comes: no
    stage is charged for the host. It finds in the L2 what the stage before left, as it always does.
    """
    found: list[dict[str, float]] = []
    marks: list[Mark] = []

    def between_events(stage: str, make: Callable[[], None]) -> None:
        marks.append(Mark(stage, _event(), _event()))
        marks[-1].start.record()
        make()
        marks[-1].end.record()

    with watched_launches(between_events):
        for _ in range(calls):
            marks.clear()
            gpu_sleep(HEAD_START)
            work()
            torch.cuda.synchronize()
            found.append(_sums(marks))
    return {stage: statistics.median(sums[stage] for sums in found) for stage in found[0]}


def before_attend_ms(work: Callable[[], object], calls: int) -> float:
    """Median milliseconds from the first launch to the first attend, which may be of a group of
    heads. They are taken as in `stage_ms`, but without events in between, each of which takes some
    microseconds."""
    start, found = _event(), []
    ends: list[Any] = []

    def after_an_event(stage: str, make: Callable[[], None]) -> None:
        if stage == ATTEND:
            ends.append(_event())
            ends[-1].record()
        make()

    with watched_launches(after_an_event):
        for _ in range(calls):
            ends.clear()
            gpu_sleep(HEAD_START)
            start.record()
            work()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(ends[0]))
    return statistics.median(found)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


@contextmanager
def watched_launches(launched: Launched) -> Iterator[None]:
    """Context in which launches of the library's kernels are made as in `Watched`."""
    given = launch.get_kernel

    def watched(spec: Any, device_index: int) -> Any:
        stage = ATTEND if spec.entry in HOPPER_ENTRIES else spec.entry
        return Watched(given(spec, device_index), stage, launched)

    launch.get_kernel = watched
    try:
        yield
    finally:
        launch.get_kernel = given


def _sums(marks: list[Mark]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for mark in marks:
        sums[mark.stage] = sums.get(mark.stage, 0.0) + mark.start.elapsed_time(mark.end)
    return sums
