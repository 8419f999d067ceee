# SPDX-License-Identifier: Apache-2.0
"""Clips are sampled once for all tests of a gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality.dit import TRAIN

from .clips import GateClips
from .gate import FULL


@pytest.fixture(scope="session")
def full_clips() -> GateClips:
    return FULL.clips()


@pytest.fixture(scope="session")
def weights(request: pytest.FixtureRequest) -> Path:
    """Weights of another small video DiT, which are too large for the repository."""
    given: Path | None = request.config.getoption("--trained")
    if given is None:
        pytest.skip(f"needs --trained FILE, weights of a model that this makes on a GPU: {TRAIN}")
    return given
