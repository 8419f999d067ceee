# SPDX-License-Identifier: Apache-2.0
"""Sizes small enough to train for a few steps in a second."""

from __future__ import annotations

import pytest

from benchmarks.tiny_video_dit.curriculum import Batch, Phase
from benchmarks.tiny_video_dit.model import Config
from tests.tiny_video_dit.parts import TOY


@pytest.fixture(scope="session")
def toy() -> Config:
    return TOY


@pytest.fixture(scope="session")
def toy_phases() -> tuple[Phase, ...]:
    return (Phase(0.5, (Batch((2, 5, 4), 2),)), Phase(1.0, (Batch((3, 4, 3), 3),)))
