# SPDX-License-Identifier: Apache-2.0
"""What 8 bits alone make of a head's error, and what that leaves to dropping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparge.calibrate import Calibration, HeadChoices, Workload
from sparge.calibrate.calibration import ROUNDING
from sparge.plan import HeadBudget, cube_order, grid_order
from tests.calibrate.begun import GRID, attend, begin


def test_rounding_is_part_of_the_error(qkv) -> None:
    calibration = begin()
    calibration.sample(0, *qkv)
    everything = calibration.offers().freeze(mean_density=1.0)
    assert everything.error.tolist() == [[pytest.approx(ROUNDING, rel=0.05)] * 3]


def by_dropping(calibration: Calibration, choices: HeadChoices) -> Tensor:
    """What of the expected errors is no rounding."""
    rounding = torch.from_numpy(calibration.rounding())
    return (choices.error.double().square() - rounding.square()).clamp(min=0).sqrt()


@pytest.fixture
def dense(qkv) -> Tensor:
    """As if 8 bits made errors of .02, .1 and .3 in the three heads."""
    exact, _ = attend(qkv, HeadBudget.uniform(3, 1.0), Workload(cube_order(GRID)))
    return exact[None] * torch.tensor([1.02, 1.1, 1.3])[:, None, None]


@pytest.mark.parametrize("walks", [False, True])
def test_rounding_of_each_head_is_measured(qkv, dense, walks: bool) -> None:
    order = grid_order(GRID) if walks else cube_order(GRID)
    calibration = begin(workload=Workload(order), layers=2, row_step=2)
    for layer in range(2):
        calibration.sample(layer, *qkv, dense=dense if layer else None)
    found = calibration.rounding()
    assert found[0].tolist() == [ROUNDING] * 3
    assert found[1].tolist() == pytest.approx([0.02, 0.1, 0.3], rel=0.02)
    choices = calibration.offers().freeze(mean_density=0.65)
    dropping = by_dropping(calibration, choices)
    torch.testing.assert_close(dropping[0], dropping[1], rtol=0.5, atol=0.02)
    rounding = torch.from_numpy(found[1]).float()
    assert (choices.error[1] >= rounding).all() and (choices.error[1] > rounding).any()


def test_what_rounding_leaves_of_a_target_may_be_dropped(qkv, dense) -> None:
    calibration = begin()
    calibration.sample(0, *qkv, dense=dense)
    dropping = by_dropping(calibration, calibration.offers().freeze(target=0.15))[0].tolist()
    most = [(0.15**2 - 0.02**2) ** 0.5, (0.15**2 - 0.1**2) ** 0.5, 0.075]
    assert all(found <= 1.02 * limit for found, limit in zip(dropping, most, strict=True))
    alone = begin()
    alone.sample(0, *qkv)
    for head, limit in enumerate(most):
        target = float(np.hypot(limit, ROUNDING))
        expected = alone.offers().freeze(target=target).density[0, head]
        assert calibration.offers().freeze(target=0.15).density[0, head] == expected


def test_what_is_not_finite_tells_nothing_of_rounding(qkv, dense) -> None:
    calibration = begin()
    calibration.sample(0, *qkv, dense=dense * torch.tensor([1, torch.inf, 1])[:, None, None])
    assert calibration.rounding()[0, 1] == ROUNDING
    assert calibration.offers().freeze(mean_density=0.6).measured.all()
