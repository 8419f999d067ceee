# SPDX-License-Identifier: Apache-2.0
"""Time of calls by the way they were computed, and what it saved."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sparge.tune import Call, RunTime, Way
from sparge.tune.records import Span, Spans

GPU = torch.device("cuda", 0)


def call_of(tokens: int, keys: int = 0) -> Call:
    q, k = torch.zeros(1, 2, tokens, 64), torch.zeros(1, 2, keys or tokens, 64)
    return Call(q, k, k)


LONG, SHORT = call_of(256), call_of(128)


@dataclass
class Mark:
    """Stands for an event."""

    seconds: float

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Mark) -> float:
        return 1000 * (end.seconds - self.seconds)


def spans(*calls: tuple[Way, float], call: Call = LONG, foretold: float | None = None) -> Spans:
    made = [
        Span(way, (call.size, GPU), foretold, Mark(1.0), Mark(1.0 + seconds))
        for way, seconds in calls
    ]
    return Spans(GPU, made)


def test_seconds_by_way_and_step() -> None:
    found = RunTime.of(
        [
            (0, spans((Way.EXACT, 4.0), (Way.EXACT, 3.0), (Way.MEASURING, 0.5))),
            (1, spans((Way.EIGHT_BIT, 2.0))),
            (1, spans((Way.SPARSE, 0.5), (Way.SPARSE, 0.25))),
        ]
    )
    assert found.by_step == {
        0: {Way.EXACT: pytest.approx(7.0), Way.MEASURING: pytest.approx(0.5)},
        1: {Way.EIGHT_BIT: pytest.approx(2.0), Way.SPARSE: pytest.approx(0.75)},
    }
    assert found.line() == (
        "Seconds of attention, in all and by step: exact 7 (7 0); 8-bit dense 2 (0 2); "
        "sparse 0.75 (0 0.75); measuring 0.5 (0.5 0)."
    )
    assert found.saved == pytest.approx(3 * 3.0 - 2.75 - 0.5) and not found.by_table


def test_the_table_tells_what_no_exact_call_does() -> None:
    exact = spans((Way.EXACT, 3.0))
    found = RunTime.of([(0, exact), (1, spans((Way.SPARSE, 0.5), call=SHORT, foretold=2.0))])
    assert found.saved == pytest.approx(1.5) and found.by_table
    assert RunTime.of([(0, exact), (1, spans((Way.SPARSE, 0.5), call=SHORT))]).saved is None
    same = RunTime.of([(0, exact), (1, spans((Way.SPARSE, 0.5), foretold=2.0))])
    assert same.saved == pytest.approx(2.5) and not same.by_table, "the run knows better"


def test_an_exact_run_saves_nothing() -> None:
    assert RunTime.of([(0, spans((Way.EXACT, 3.0), foretold=4.0))]).saved is None
    nothing = RunTime.of([])
    assert nothing.saved is None and nothing.line() == ""


def test_what_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What raises, what a CUDA graph records, calls of other keys, and other devices."""

    class Event(Mark):
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.seconds = 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    recorded = False
    monkeypatch.setattr("sparge.tune.records.being_recorded", lambda device: recorded)
    on_gpu, on_cpu = Spans(GPU), Spans(torch.device("cpu"))
    for found in (on_gpu, on_cpu):
        with pytest.raises(ZeroDivisionError), found.around(Way.SPARSE, LONG, None):
            raise ZeroDivisionError
        for call in (LONG, call_of(128, keys=256)):
            with found.around(Way.SPARSE, call, None):
                pass
    recorded = True
    with on_gpu.around(Way.SPARSE, LONG, None):
        pass
    assert len(on_gpu.spans) == 1 and on_cpu.spans == []
