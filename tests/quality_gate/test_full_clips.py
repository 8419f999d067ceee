# SPDX-License-Identifier: Apache-2.0
"""The quality gate on a GPU: full clips of the shipped model, and of one that is trained for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .clips import GateClips
from .gate import FULL, behind_drop, below_floors
from .mechanisms import MECHANISMS

pytestmark = pytest.mark.gpu


@torch.no_grad()
def test_auto_keeps_its_quality(full_clips: GateClips) -> None:
    found = FULL.found(full_clips)
    assert [*below_floors(found, FULL.floors()), *behind_drop(FULL, found, full_clips)] == []


@pytest.mark.parametrize("mechanism", MECHANISMS)
@torch.no_grad()
def test_the_gate_notices_what_is_switched_off(mechanism: str, full_clips: GateClips) -> None:
    with MECHANISMS[mechanism]():
        found = FULL.found(full_clips)
    assert list(below_floors(found, FULL.floors())) != []


@torch.no_grad()
def test_another_model_is_ahead_of_plain_dropping(weights: Path) -> None:
    clips = FULL.clips(weights)
    assert list(behind_drop(FULL, FULL.found(clips), clips)) == []
