# SPDX-License-Identifier: Apache-2.0
"""Densities that fall from step to step, with the mean that was asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparge.calibrate import falling

KEY_BLOCKS = 700
STEPS = 16
POSITIONS = [step / (STEPS - 1) for step in range(STEPS)]


def shares(density: Tensor) -> Tensor:
    """Of all key blocks, as attention counts them."""
    return (density * KEY_BLOCKS).long().double() / KEY_BLOCKS


@pytest.fixture
def density(generator: torch.Generator) -> Tensor:
    """Of 200 heads, tenfold apart; some are dense."""
    return (
        (0.06 * 12 ** torch.rand(200, generator=generator))
        .clamp(max=0.5)
        .where(torch.rand(200, generator=generator) < 0.97, 1.0)
    )


@pytest.mark.parametrize("scale", [0.2, 0.5, 1.0, 1.8])
def test_the_mean_over_steps_is_what_was_asked_for(density: Tensor, scale: float) -> None:
    asked = (scale * density).clamp(max=1)
    steps = [shares(falling(asked, position, KEY_BLOCKS)) for position in POSITIONS]
    means = torch.stack([step.mean() for step in steps])
    assert (means.diff() < 0).all()
    least = 1 - 1 / (KEY_BLOCKS * float(asked.mean()))
    assert least <= means.mean() / shares(asked).mean() <= 1 + 1e-9
    assert means[0] / means[-1] > 1.5


def test_heads_keep_their_proportions(density: Tensor) -> None:
    early, late = (falling(density, position, KEY_BLOCKS) for position in (0.0, 1.0))
    free = (density < 0.3) & (early < 1)
    for step in (early, late):
        factor = (step / density)[free]
        assert factor.std() / factor.mean() < 0.02
        assert step.dtype == torch.float32 and float(step.max()) <= 1
    assert (early[density == 1] == 1).all()


def test_the_middle_is_the_mean(density: Tensor) -> None:
    middle = falling(density, 0.5, KEY_BLOCKS)
    assert (shares(middle) - shares(density)).abs().max() < 1.5 / KEY_BLOCKS


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_nothing_and_everything_do_not_fall(value: float) -> None:
    density = torch.full((3,), value)
    assert torch.equal(falling(density, 0.0, KEY_BLOCKS), density)


def test_high_means_fall_as_far_as_all_blocks_allow() -> None:
    density = torch.full((4,), 0.8)
    assert shares(falling(density, 0.0, KEY_BLOCKS)).mean() == pytest.approx(1.0, abs=0.002)
    assert shares(falling(density, 1.0, KEY_BLOCKS)).mean() == pytest.approx(0.6, abs=0.002)
