# SPDX-License-Identifier: Apache-2.0
"""Error that 8 bits alone make in a head, and what that leaves to dropping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparge.head_settings import HeadBudget
from sparge.order.grid import cube_order, grid_order
from sparge.tune import Calibration, HeadChoices, Workload
from sparge.tune.calibration import ROUNDING
from tests.tune.begun import GRID, attend, begin


def test_rounding_is_part_of_the_error(qkv) -> None:
    calibration = begin()
    calibration.sample(0, *qkv)
    everything = calibration.offers().freeze(mean_density=1.0)
    assert everything.error.tolist() == [[pytest.approx(ROUNDING, rel=0.05)] * 3]


def by_dropping(calibration: Calibration, choices: HeadChoices) -> Tensor:
    """Part of the expected errors that is no rounding."""
    rounding = torch.from_numpy(calibration.rounding())
    return (choices.error.double().square() - rounding.square()).clamp(min=0).sqrt()


@pytest.fixture
def dense(qkv) -> Tensor:
    """Dense results as if 8 bits made errors of 0.02, 0.1 and 0.3 in the three heads."""
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


def test_rounding_is_part_of_what_a_target_allows(qkv, dense) -> None:
    calibration, alone = begin(), begin()
    calibration.sample(0, *qkv, dense=dense)
    alone.sample(0, *qkv)
    rounded, exact = (x.offers().freeze(target=0.3) for x in (calibration, alone))
    assert exact.mean_error <= 0.3 and rounded.mean_error <= 0.3
    assert rounded.density.mean() > exact.density.mean()


def test_half_of_a_target_that_rounding_misses_may_be_dropped(qkv, dense) -> None:
    """A missed target is no reason to keep everything."""
    calibration = begin()
    calibration.sample(0, *qkv, dense=dense)
    offers = calibration.offers()
    rounding = float((offers.loudness * offers.rounding).mean())
    choices = offers.freeze(target=0.06)
    assert rounding > 0.06 and choices.density.min() < 1
    assert rounding < choices.mean_error <= np.hypot(rounding, 0.03) + 1e-6


def test_what_is_not_finite_tells_nothing_of_rounding(qkv, dense) -> None:
    calibration = begin()
    calibration.sample(0, *qkv, dense=dense * torch.tensor([1, torch.inf, 1])[:, None, None])
    assert calibration.rounding()[0, 1] == ROUNDING
    assert calibration.offers().freeze(mean_density=0.6).measured.all()
