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
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.kernel.launch(*arguments, **named)
        end.record()
        self.marks.append(Mark(self.stage, start, end))


def stage_ms(work: Callable[[], object], calls: int) -> dict[str, float]:
    """Median milliseconds of each stage over some calls; launches of one stage are added up.

    The GPU sleeps before each call, so that every launch is queued before its turn comes: no
    stage is charged for the host. It finds in the L2 what the stage before left, as it always does.
    """
    found: list[dict[str, float]] = []
    with watched_launches() as marks:
        for _ in range(calls):
            marks.clear()
            torch.cuda._sleep(HEAD_START)
            work()
            torch.cuda.synchronize()
            found.append(_sums(marks))
    return {stage: statistics.median(sums[stage] for sums in found) for stage in found[0]}


@contextmanager
def watched_launches() -> Iterator[list[Mark]]:
    """While it lasts, launches of the library's kernels leave a mark each."""
    marks: list[Mark] = []
    given = launch.get_kernel

    def watched(spec: Any, device_index: int) -> Any:
        stage = "attend" if spec.entry in HOPPER_ENTRIES else spec.entry
        return Watched(given(spec, device_index), stage, marks)

    launch.get_kernel = watched
    try:
        yield marks
    finally:
        launch.get_kernel = given


def _sums(marks: list[Mark]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for mark in marks:
        sums[mark.stage] = sums.get(mark.stage, 0.0) + mark.start.elapsed_time(mark.end)
    return sums
