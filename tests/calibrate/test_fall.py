# SPDX-License-Identifier: Apache-2.0
"""Densities that fall from step to step, with the mean that was asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparge.calibrate import falling
from sparge.calibrate.fall import fall_of

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
    assert means.mean() == pytest.approx(float(shares(asked).mean()), rel=1e-4)


@pytest.mark.parametrize("key_blocks", [20, 72])
@pytest.mark.parametrize("asked", [0.1, 0.25])
def test_heads_that_are_alike_share_what_few_blocks_leave(key_blocks: int, asked: float) -> None:
    density = torch.full((48,), asked)
    steps = [falling(density, position, key_blocks) * key_blocks for position in POSITIONS]
    kept = torch.stack([step.long().double().mean() for step in steps])
    assert (kept.diff() < 0).all()
    assert kept.mean() == pytest.approx(int(asked * key_blocks), rel=0.01)


@pytest.mark.parametrize(
    ("mean", "fall"), [(0.1, 0.6), (0.2, 0.45), (0.3, 0.3), (0.5, 0), (0.9, 0)]
)
def test_the_denser_the_less_it_falls(mean: float, fall: float) -> None:
    density = torch.full((100,), mean)
    first, last = (float(shares(falling(density, at, KEY_BLOCKS)).mean()) for at in (0.0, 1.0))
    assert fall_of(mean) == pytest.approx(fall, abs=1e-9)
    assert (first / mean - 1, 1 - last / mean) == pytest.approx((fall, fall), abs=0.01)


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
    assert torch.equal(shares(middle), shares(density))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_nothing_and_everything_do_not_fall(value: float) -> None:
    density = torch.full((3,), value)
    assert torch.equal(shares(falling(density, 0.0, KEY_BLOCKS)), density.double())
