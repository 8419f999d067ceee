# SPDX-License-Identifier: Apache-2.0
"""What budgets share with the choices they come from, and which places samples take."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparge import TokenGrid, cube_order
from sparge.calibrate import Calibration, CandidateSet, HeadChoices, Workload
from sparge.calibrate.spread import spread_places

GRID = TokenGrid(4, 8, 15)


def begin() -> Calibration:
    return Calibration.begin(
        layers=2,
        heads=2,
        workload=Workload(cube_order(GRID)),
        candidates=CandidateSet(densities=(0.2, 0.5, 1.0), gains=(0.0, 0.7)),
        blocks_a_call=2,
    )


def test_a_budget_shares_nothing_with_the_choices(make_qkv) -> None:
    calibration = begin()
    calibration.sample(0, *make_qkv(1, 2, GRID.tokens, 16))
    choices = calibration.offers().freeze(mean_density=0.6)
    before = choices.density.clone()
    budget = choices.budget(0)
    assert budget is not None
    assert budget.pools == bool(choices.gain[0].any() or choices.router[0].any())
    budget.set_density(torch.ones(2))
    assert torch.equal(choices.density, before)


def test_places_are_visited_once_before_any_comes_again() -> None:
    for count in range(1, 50):
        assert sorted(spread_places(count, 7, count)) == list(range(count))
    assert len(spread_places(5, 0, 100)) == 5


def test_budgets_keep_the_structure_of_those_before() -> None:
    """Of one step to the next: what a call allocates depends on it."""
    none, measured = torch.zeros(2, 2), torch.tensor([True, False])
    plain = HeadChoices(none + 0.5, none, none.int(), none.int(), none, none, measured)
    walking = replace(plain, gain=none + 1, walk=none.int() + 2)
    first, unmeasured = plain.budgets()
    assert first is not None and not first.pools and first.walk is None and unmeasured is None
    after, _ = plain.budgets(before=walking.budgets())
    assert after is not None and after.pools and after.walk is not None
    assert not after.gain.any() and not after.walk.any(), "its own choices"
