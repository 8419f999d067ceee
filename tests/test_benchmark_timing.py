# SPDX-License-Identifier: Apache-2.0
"""A call's time is the GPU's, whatever the host takes to queue it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import CLOCKS_A_MS, LONGEST_SLEEP, median_ms

JITTER = (0.3, 0.1, 0.6, 0.2)  # ms that the host adds to what it takes for a call


@dataclass
class Machine:
    """A host and the stream of a GPU, each with the ms at which it has done all it was given."""

    host: float = 0.0
    gpu: float = 0.0
    log: list[str] = field(default_factory=list)
    slept: float = 0.0

    def call(
        self, gpu_ms: float, host_ms: float, waits: bool = False, launches: int = 2
    ) -> Callable[[], None]:
        jitter = cycle(JITTER)

        def work() -> None:
            self.log.append("call")
            for more in (next(jitter), *[0.0] * (launches - 1)):
                self.host += host_ms / launches + more
                self.queue(gpu_ms / launches)
                if waits:
                    self.synchronize()

        return work

    def queue(self, ms: float) -> None:
        self.gpu = max(self.gpu, self.host) + ms

    def sleep(self, clocks: int) -> None:
        self.log.append("sleep")
        self.slept += clocks / CLOCKS_A_MS
        self.queue(clocks / CLOCKS_A_MS)

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.at = 0.0

    def record(self) -> None:
        self._machine.log.append("event")
        self._machine.queue(0.0)
        self.at = self._machine.gpu

    def query(self) -> bool:
        return self.at <= self._machine.host

    def elapsed_time(self, end: Event) -> float:
        assert end.at <= self._machine.host, "it is over"
        return end.at - self.at


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    clock = SimpleNamespace(perf_counter=lambda: found.host / 1000)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "_sleep", found.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    return found


@pytest.mark.parametrize("warm_up", [0, 3])
@pytest.mark.parametrize("repeats", [1, 3, 20])
def test_short_calls_are_queued_behind_a_sleep(
    machine: Machine, repeats: int, warm_up: int
) -> None:
    assert median_ms(machine.call(0.25, 0.3), repeats, warm_up) == pytest.approx(0.25)
    a_call = ["event", "call", "event"]
    assert machine.log == ["call"] * warm_up + repeats * a_call + ["sleep"] + repeats * a_call
    assert 0 < machine.slept <= LONGEST_SLEEP


@pytest.mark.parametrize(("warm_up", "repeats"), [(1, 1), (0, 3), (3, 10)])
def test_long_calls_are_not_slept_for(machine: Machine, warm_up: int, repeats: int) -> None:
    assert median_ms(machine.call(10.0, 0.3), repeats, warm_up) == pytest.approx(10.0)
    assert machine.log.count("call") == warm_up + repeats and machine.slept == 0


def test_a_call_that_waits_for_the_gpu_is_timed_as_it_was(machine: Machine) -> None:
    """The GPU then waits for the host after it, sleep or not."""
    times = [median_ms(machine.call(0.25, 0.3, True), with_host=asked) for asked in (True, False)]
    assert times[1] == pytest.approx(times[0], rel=0.01) and machine.slept > 0
