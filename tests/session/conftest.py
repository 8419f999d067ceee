# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from sparge.session import heads, timing
from sparge.session import session as session_module
from sparge.session.measure import MeasuredCall
from sparge.session.timing import Times
from sparge.stages import on_reference
from sparge.stages.kind import CallTensors
from tests.session.parts import GRID, Qkv, neighbours_alike, nothing_measured


@pytest.fixture
def untested() -> Iterator[None]:
    """No device was tested yet, nor is one known after the test."""
    timing.why_wrong.cache_clear()
    yield
    timing.why_wrong.cache_clear()


@pytest.fixture
def by_reference(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse calls on a CPU, by the reference."""
    monkeypatch.setenv("SPARGE_REFERENCE", "1")


@pytest.fixture
def qkv(generator: torch.Generator) -> Qkv:
    return neighbours_alike(GRID, generator)


@pytest.fixture
def asked(by_reference: None, monkeypatch: pytest.MonkeyPatch) -> list[MeasuredCall]:
    """Calls that are measured, which nothing computes. Sparse calls give zeros."""
    found: list[MeasuredCall] = []

    def measure(call: MeasuredCall, with_truth: bool = False):
        found.append(call)
        return nothing_measured(call, with_truth)

    def attend(tensors: CallTensors, *_: object) -> tuple[Tensor, None]:
        if tensors.counters is not None:
            tensors.counters.add_(1)
        return torch.zeros(tensors.q.shape), None

    monkeypatch.setattr(heads, "measure", measure)
    monkeypatch.setattr(on_reference, "attend", attend)
    return found


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Times | None], None]:
    """timed(times): every call takes those on a pretended GPU."""

    def of(times: Times | None) -> None:
        monkeypatch.setattr(session_module, "times_of", lambda *_: times)

    return of
