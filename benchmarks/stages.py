# SPDX-License-Identifier: Apache-2.0
"""What each stage of a call takes, by events around every launch of our kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sparge import launch
from sparge.kernels.spec import HOPPER_ENTRIES

ATTEND = "attend"
HEAD_START = 4_000_000  # clocks: about 2 ms, in which the host queues a call of a few launches


@dataclass(frozen=True)
class Mark:
    stage: str
    start: Any
    end: Any


@dataclass(frozen=True)
class Watched:
    """Stands for a kernel, and notes when each launch began and ended on its stream."""

    kernel: Any
    stage: str
    marks: list[Mark]

    def launch(self, *arguments: Any, **named: Any) -> None:
        start, end = _event(), _event()
        start.record()
        self.kernel.launch(*arguments, **named)
        end.record()
        self.marks.append(Mark(self.stage, start, end))


@dataclass(frozen=True)
class Ended:
    """Stands for a kernel, and notes each time that attend's turn came on its stream."""

    kernel: Any
    stage: str
    ends: list[Any]

    def launch(self, *arguments: Any, **named: Any) -> None:
        if self.stage == ATTEND:
            self.ends.append(_event())
            self.ends[-1].record()
        self.kernel.launch(*arguments, **named)


def stage_ms(work: Callable[[], object], calls: int) -> dict[str, float]:
    """Median milliseconds of each stage over some calls; launches of one stage are added up.

    The GPU sleeps before each call, so that every launch is queued before its turn comes: no
    stage is charged for the host. It finds in the L2 what the stage before left, as it always does.
    """
    found: list[dict[str, float]] = []
    marks: list[Mark] = []
    with each_kernel(lambda kernel, stage: Watched(kernel, stage, marks)):
        for _ in range(calls):
            marks.clear()
            torch.cuda._sleep(HEAD_START)
            work()
            torch.cuda.synchronize()
            found.append(_sums(marks))
    return {stage: statistics.median(sums[stage] for sums in found) for stage in found[0]}


def before_attend_ms(work: Callable[[], object], calls: int) -> float:
    """Median milliseconds from the first launch to the first attend, which may be of a group of
    heads: as `stage_ms`, but without events in between, each of which takes some microseconds."""
    start, found = _event(), []
    ends: list[Any] = []
    with each_kernel(lambda kernel, stage: Ended(kernel, stage, ends)):
        for _ in range(calls):
            ends.clear()
            torch.cuda._sleep(HEAD_START)
            start.record()
            work()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(ends[0]))
    return statistics.median(found)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


@contextmanager
def each_kernel(instead: Callable[[Any, str], Any]) -> Iterator[None]:
    """While it lasts, `instead` of a kernel of the library and its stage is what is launched."""
    given = launch.get_kernel

    def replaced(spec: Any, device_index: int) -> Any:
        stage = ATTEND if spec.entry in HOPPER_ENTRIES else spec.entry
        return instead(given(spec, device_index), stage)

    launch.get_kernel = replaced
    try:
        yield
    finally:
        launch.get_kernel = given


def _sums(marks: list[Mark]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for mark in marks:
        sums[mark.stage] = sums.get(mark.stage, 0.0) + mark.start.elapsed_time(mark.end)
    return sums
