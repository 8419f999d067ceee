# SPDX-License-Identifier: Apache-2.0
"""Sizes small enough to train for a few steps in a second."""

from __future__ import annotations

import pytest
import torch

from benchmarks.tiny_video_dit.curriculum import Batch, Phase
from benchmarks.tiny_video_dit.model import Config, VideoDiT


@pytest.fixture(scope="session")
def toy() -> Config:
    return Config(width=128, blocks=2, hidden=128)


@pytest.fixture(scope="session")
def toy_phases() -> tuple[Phase, ...]:
    return (Phase(0.5, (Batch((2, 5, 4), 2),)), Phase(1.0, (Batch((3, 4, 3), 3),)))


@pytest.fixture
def toy_model(toy: Config, generator: torch.Generator) -> VideoDiT:
    """Every weight random, so that no part is idle."""
    model = VideoDiT(toy).requires_grad_(False)
    for name, parameter in model.named_parameters():
        spread = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
        parameter.normal_(1.0 if "norm" in name else 0.0, spread, generator=generator)
    return model
