# SPDX-License-Identifier: Apache-2.0
"""Error that 8 bits alone make in a head, and what that leaves to dropping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparge.head_settings import HeadSettings
from sparge.order.grid import cube_order, grid_order
from sparge.tune import HeadChoices, Measurement, Workload
from sparge.tune.measurement import ROUNDING
from tests.tune.begun import GRID, attend, begin


def test_rounding_is_part_of_the_error(qkv) -> None:
    measurement = begin()
    measurement.sample(0, *qkv)
    everything = measurement.offers().freeze(mean_density=1.0)
    assert everything.error.tolist() == [[pytest.approx(ROUNDING, rel=0.05)] * 3]


def by_dropping(measurement: Measurement, choices: HeadChoices) -> Tensor:
    """Part of the expected errors that is no rounding."""
    rounding = torch.from_numpy(measurement.rounding())
    return (choices.error.double().square() - rounding.square()).clamp(min=0).sqrt()


@pytest.fixture
def dense(qkv) -> Tensor:
    """Dense results as if 8 bits made errors of 0.02, 0.1 and 0.3 in the three heads."""
    exact, _ = attend(qkv, HeadSettings.uniform(3, 1.0), Workload(cube_order(GRID)))
    return exact[None] * torch.tensor([1.02, 1.1, 1.3])[:, None, None]


@pytest.mark.parametrize("order_kinds", [False, True])
def test_rounding_of_each_head_is_measured(qkv, dense, order_kinds: bool) -> None:
    order = grid_order(GRID) if order_kinds else cube_order(GRID)
    measurement = begin(workload=Workload(order), layers=2, row_step=2)
    for layer in range(2):
        measurement.sample(layer, *qkv, dense=dense if layer else None)
    found = measurement.rounding()
    assert found[0].tolist() == [ROUNDING] * 3
    assert found[1].tolist() == pytest.approx([0.02, 0.1, 0.3], rel=0.02)
    choices = measurement.offers().freeze(mean_density=0.65)
    dropping = by_dropping(measurement, choices)
    torch.testing.assert_close(dropping[0], dropping[1], rtol=0.5, atol=0.02)
    rounding = torch.from_numpy(found[1]).float()
    assert (choices.error[1] >= rounding).all() and (choices.error[1] > rounding).any()


def test_rounding_is_part_of_what_a_target_allows(qkv, dense) -> None:
    measurement, alone = begin(), begin()
    measurement.sample(0, *qkv, dense=dense)
    alone.sample(0, *qkv)
    rounded, exact = (x.offers().freeze(target=0.3) for x in (measurement, alone))
    assert exact.mean_error <= 0.3 and rounded.mean_error <= 0.3
    assert rounded.density.mean() > exact.density.mean()


def test_half_of_a_target_that_rounding_misses_may_be_dropped(qkv, dense) -> None:
    """A missed target is no reason to keep everything."""
    measurement = begin()
    measurement.sample(0, *qkv, dense=dense)
    offers = measurement.offers()
    rounding = float((offers.head_weight * offers.rounding).mean())
    choices = offers.freeze(target=0.06)
    assert rounding > 0.06 and choices.density.min() < 1
    assert rounding < choices.mean_error <= np.hypot(rounding, 0.03) + 1e-6


def test_what_is_not_finite_tells_nothing_of_rounding(qkv, dense) -> None:
    measurement = begin()
    measurement.sample(0, *qkv, dense=dense * torch.tensor([1, torch.inf, 1])[:, None, None])
    assert measurement.rounding()[0, 1] == ROUNDING
    assert measurement.offers().freeze(mean_density=0.6).measured.all()
