# SPDX-License-Identifier: Apache-2.0
"""Time of calls by the way they were computed, and what it saved."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sparge.speed import Cost, Size, SpeedTable, Times
from sparge.tune import RunTime, Way
from sparge.tune.run_time import Span, Spans

GPU = torch.device("cuda", 0)
LONG, SHORT = Size(8192, 2, 64), Size(4096, 2, 64)


@dataclass
class Mark:
    """Stands for an event."""

    seconds: float

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Mark) -> float:
        return 1000 * (end.seconds - self.seconds)


def spans(*calls: tuple[Way, float], size: Size = LONG) -> Spans:
    return Spans(GPU, [Span(way, size, GPU, Mark(1.0), Mark(1.0 + s)) for way, s in calls])


def table(exact: float) -> SpeedTable:
    cost = Cost(exact, 0.0, 0.0, 0.0)
    return SpeedTable({}, "", {64: Times(cost, cost, cost, margin=0.0)})


def test_seconds_by_way_and_step() -> None:
    passes = [
        (0, spans((Way.EXACT, 4.0), (Way.EXACT, 3.0))),
        (1, spans((Way.EIGHT_BIT, 2.0))),
        (1, spans((Way.SPARSE, 0.5), (Way.SPARSE, 0.25))),
    ]
    found = RunTime.of(passes, lambda device: None)
    assert found.by_step == {
        0: {Way.EXACT: pytest.approx(7.0)},
        1: {Way.EIGHT_BIT: pytest.approx(2.0), Way.SPARSE: pytest.approx(0.75)},
    }
    assert found.line() == (
        "Seconds of attention, in all and by step: exact 7 (7 0); 8-bit dense 2 (0 2); "
        "sparse 0.75 (0 0.75)."
    )
    assert found.saved == pytest.approx(3 * 3.0 - 2.75) and not found.by_table, "the least is 3 s"


def test_the_table_tells_what_no_exact_call_does() -> None:
    passes = [(0, spans((Way.EXACT, 3.0))), (1, spans((Way.SPARSE, 0.5), size=SHORT))]
    found = RunTime.of(passes, lambda device: table(2.0))
    assert found.saved == pytest.approx(1.5) and found.by_table
    assert RunTime.of(passes, lambda device: None).saved is None
    other = SpeedTable({}, "", {})
    assert RunTime.of(passes, lambda device: other).saved is None, "of another head_dim"


def test_an_exact_run_saves_nothing() -> None:
    assert RunTime.of([(0, spans((Way.EXACT, 3.0)))], lambda device: table(2.0)).saved is None
    nothing = RunTime.of([], lambda device: None)
    assert nothing.saved is None and nothing.line() == ""


def test_a_call_that_raises_is_not_counted_nor_one_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Event(Mark):
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.seconds = 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    on_gpu, on_cpu = Spans(GPU), Spans(torch.device("cpu"))
    for found in (on_gpu, on_cpu):
        with pytest.raises(ZeroDivisionError), found.around(Way.SPARSE, LONG):
            raise ZeroDivisionError
        with found.around(Way.SPARSE, LONG):
            pass
    assert len(on_gpu.spans) == 1 and on_cpu.spans == []
