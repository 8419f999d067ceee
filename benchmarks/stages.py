# SPDX-License-Identifier: Apache-2.0
"""Time of each stage of a call, by events around every launch of our kernels."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from sparge.kernels.spec import HOPPER_ENTRIES

from .timing import gpu_sleep

Work = Callable[[], object]
Launched = Callable[[str, Callable[[], None]], None]

ATTEND = "attend"
HEAD_START = 2.0  # ms, in which the host queues a call of a few launches


@dataclass(frozen=True)
class Watched:
    """Substitute for a kernel: `launched` gets its stage and the launch, which it makes."""

    kernel: Any
    stage: str
    launched: Launched

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def launch(self, *arguments: Any, **named: Any) -> None:
        self.launched(self.stage, partial(self.kernel.launch, *arguments, **named))


def stage_ms(work: Work, calls: int, library: str = "sparge") -> dict[str, float]:
    """Median milliseconds of each stage over some calls; launches of one stage are added up.

    The GPU sleeps before each call, so that every launch is queued before its turn comes: no stage
    is charged for the host. It finds in the L2 what the stage before left, as it always does.
    """
    marks: list[tuple[str, Any, Any]] = []
    found: dict[str, list[float]] = defaultdict(list)

    def between_events(stage: str, make: Callable[[], None]) -> None:
        marks.append((stage, _event(), _event()))
        marks[-1][1].record()
        make()
        marks[-1][2].record()

    with watched_launches(between_events, library):
        for _ in range(calls):
            marks.clear()
            _queued(work)
            for stage in dict.fromkeys(stage for stage, _, _ in marks):
                spans = (start.elapsed_time(end) for name, start, end in marks if name == stage)
                found[stage].append(sum(spans))
    return {stage: statistics.median(ms) for stage, ms in found.items()}


def before_attend_ms(work: Work, calls: int) -> float:
    """Median milliseconds from the first launch to the first attend, which may be of a group of
    heads: as in `stage_ms`, but without events in between, each of which takes some
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
            _queued(work, start)
            found.append(start.elapsed_time(ends[0]))
    return statistics.median(found)


def _queued(work: Work, start: Any = None) -> None:
    """Makes a call while the GPU sleeps, the event `start` before it, and waits for its end."""
    gpu_sleep(HEAD_START)
    if start is not None:
        start.record()
    work()
    torch.cuda.synchronize()


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


@contextmanager
def watched_launches(launched: Launched, library: str = "sparge") -> Iterator[None]:
    """Context in which launches of the library's kernels are made as in `Watched`."""
    launch = _launch_module(library)
    given = launch.get_kernel

    def watched(spec: Any, device_index: int) -> Any:
        stage = ATTEND if spec.entry in HOPPER_ENTRIES else spec.entry
        return Watched(given(spec, device_index), stage, launched)

    with patch.object(launch, "get_kernel", watched):
        yield


def _launch_module(library: str) -> ModuleType:
    """The module whose `get_kernel` every launch asks; versions before `sparge/stages` have it on
    top."""
    try:
        return import_module(f"{library}.stages.launch")
    except ModuleNotFoundError:
        return import_module(f"{library}.launch")
