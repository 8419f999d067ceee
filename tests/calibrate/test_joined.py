# SPDX-License-Identifier: Apache-2.0
"""A batch measured at once, and its entries one by one."""

from __future__ import annotations

import torch

from sparge import TokenGrid, cube_order
from sparge.calibrate import Calibration, CandidateSet, Workload
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


def test_entries_joined_are_the_batch(make_qkv) -> None:
    q, k, v = make_qkv(2, 2, GRID.tokens, 16)
    batch, *apart = begin(), begin(), begin()
    for _ in range(2):
        batch.sample(0, q, k, v)
        for entry, one in enumerate(apart):
            one.sample(0, *(x[entry : entry + 1] for x in (q, k, v)))
    before = apart[0].squared_norm.clone()
    joined = apart[0].joined(apart[1:])
    assert joined.samples.tolist() == batch.samples.tolist() == [[4], [0]]
    torch.testing.assert_close(joined.squared_error, batch.squared_error)
    torch.testing.assert_close(joined.squared_norm, batch.squared_norm)
    assert torch.equal(apart[0].squared_norm, before), "untouched"
    one, other = joined.freeze(mean_density=0.5), batch.freeze(mean_density=0.5)
    assert torch.equal(one.density, other.density)
    assert torch.equal(one.gain, other.gain)


def test_a_budget_shares_nothing_with_the_choices(make_qkv) -> None:
    calibration = begin()
    calibration.sample(0, *make_qkv(1, 2, GRID.tokens, 16))
    choices = calibration.freeze(mean_density=0.6)
    before = choices.density.clone()
    budget = choices.budget(0)
    assert budget is not None
    assert budget.pools == bool(choices.gain[0].any())
    budget.set_density(torch.ones(2))
    assert torch.equal(choices.density, before)


def test_places_are_visited_once_before_any_comes_again() -> None:
    for count in range(1, 50):
        assert sorted(spread_places(count, 7, count)) == list(range(count))
    assert len(spread_places(5, 0, 100)) == 5
