# SPDX-License-Identifier: Apache-2.0
"""The quality gate: a small clip of the shipped model in float32 on any machine; on a GPU full
clips, each mechanism switched off, and a model that is trained for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quality.dit import TRAIN, DenseRun

from .gate import FEW, FULL, SMALL, Gate, behind_drop, below_floors
from .mechanisms import MECHANISMS


@pytest.fixture(scope="module")
def full_clips() -> list[DenseRun]:
    return FULL.dense()


def misses(gate: Gate, clips: list[DenseRun]) -> list[str]:
    found = gate.found(clips)
    return [*below_floors(found, gate.floors()), *behind_drop(gate, found, clips)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="full clips guard GPUs")
@torch.no_grad()
def test_auto_keeps_its_quality_on_a_small_clip(one_thread: None) -> None:
    assert misses(SMALL, SMALL.dense()) == []


@pytest.mark.gpu
@torch.no_grad()
def test_auto_keeps_its_quality(full_clips: list[DenseRun]) -> None:
    assert misses(FULL, full_clips) == []


@pytest.mark.gpu
@pytest.mark.parametrize("steps", FEW)
@torch.no_grad()
def test_auto_keeps_its_quality_in_few_steps(steps: int) -> None:
    assert misses(FEW[steps], FEW[steps].dense()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", MECHANISMS)
@torch.no_grad()
def test_the_gate_notices_what_is_switched_off(mechanism: str, full_clips) -> None:
    with MECHANISMS[mechanism]():
        found = FULL.found(full_clips)
    assert list(below_floors(found, FULL.floors())) != []


@pytest.mark.gpu
@torch.no_grad()
def test_another_model_is_ahead_of_plain_dropping(request: pytest.FixtureRequest) -> None:
    weights: Path | None = request.config.getoption("--trained")
    if weights is None:  # it is too large for the repository
        pytest.skip(f"needs --trained FILE, weights of a model that this makes on a GPU: {TRAIN}")
    clips = FULL.dense(weights)
    assert list(behind_drop(FULL, FULL.found(clips), clips)) == []
