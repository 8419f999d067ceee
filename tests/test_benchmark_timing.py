# SPDX-License-Identifier: Apache-2.0
"""A call's time is the GPU's, whatever the host takes to queue it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import CLOCKS_A_MS, LONGEST_SLEEP, median_ms


class Machine:
    """A host and the stream of a GPU, each with the ms at which it has done all it was given."""

    host = gpu = slept = 0.0

    def call(self, gpu_ms: float, host_ms: float) -> Callable[[], None]:
        def work() -> None:
            self.host += host_ms
            self.queue(gpu_ms)

        return work

    def queue(self, ms: float) -> None:
        self.gpu = max(self.gpu, self.host) + ms

    def sleep(self, clocks: int) -> None:
        self.slept += clocks / CLOCKS_A_MS
        self.queue(clocks / CLOCKS_A_MS)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        found = SimpleNamespace(at=0.0, query=lambda: found.at <= self.host)

        def record() -> None:
            self.queue(0.0)
            found.at = self.gpu

        found.record, found.elapsed_time = record, lambda end: end.at - found.at
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    clock = SimpleNamespace(perf_counter=lambda: found.host / 1000)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "_sleep", found.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def test_short_calls_are_queued_behind_a_sleep(machine: Machine) -> None:
    for repeats in (1, 20):
        machine.slept = 0.0
        assert median_ms(machine.call(0.25, 0.3), repeats) == pytest.approx(0.25)
    assert 0 < machine.slept <= LONGEST_SLEEP
    machine.host = machine.gpu
    assert median_ms(machine.call(0.25, 0.3), repeats, with_host=True) > 0.29


def test_long_calls_are_not_slept_for(machine: Machine) -> None:
    assert median_ms(machine.call(10.0, 0.3), 3) == pytest.approx(10.0)
    median_ms(machine.call(0.1, 6.0), 10)
    assert machine.slept == 0, "less than what the host takes would not do"
