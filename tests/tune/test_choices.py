# SPDX-License-Identifier: Apache-2.0
"""Facts that head settings share with the choices they come from, and places that measurements
take."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparge import TokenGrid, cube_order
from sparge.policy import SparsePolicy
from sparge.thresholds import COLUMNS
from sparge.tune import Calibration, CandidateSet, HeadChoices, Workload
from sparge.tune.spread import spread_places

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
    budget.density.fill_(1)
    assert torch.equal(choices.density, before)


def test_places_are_visited_once_before_any_comes_again() -> None:
    for count in range(1, 50):
        assert sorted(spread_places(count, 7, count)) == list(range(count))
    assert len(spread_places(5, 0, 100)) == 5


def test_budgets_keep_the_structure_of_those_before() -> None:
    """What a call allocates depends on the structure, which stays from one step to the next."""
    none, measured = torch.zeros(2, 2), torch.tensor([True, False])
    ints = none.int()
    plain = HeadChoices(none + 0.5, none, none + 1, ints, ints, none, none, measured)
    rich = replace(plain, gain=none + 1, contrast=none + 1.5, walk=ints + 1)
    first, unmeasured = plain.budgets()
    assert first is not None and not first.pools and unmeasured is None
    assert first.walk is None and first.contrast is None
    after, _ = plain.budgets(before=rich.budgets())
    assert after is not None and after.pools
    assert after.walk is not None
    assert not (after.gain.any() or after.walk.any()), "its own choices"
    assert after.contrast is not None and (after.contrast == 1).all()


def test_all_layers_have_an_output_scale_if_one_head_has() -> None:
    none, measured = torch.zeros(2, 2), torch.ones(2).bool()
    contrast, ints = torch.tensor([[1.0, 1.0], [1.5, 1.0]]), none.int()
    choices = HeadChoices(none + 0.5, none, contrast, ints, ints, none, none, measured)
    policy = SparsePolicy()
    for layer, budget in enumerate(choices.budgets(policy=policy)):
        assert budget is not None
        assert budget.contrast is not None and torch.equal(budget.contrast, contrast[layer])
        assert torch.equal(budget.table(policy)[:, COLUMNS.index("contrast")], contrast[layer])
        own = replace(budget)
        assert torch.equal(budget.table(policy), own.table(policy)), "made for all at once"
        budget.contrast.zero_()
    assert float(choices.contrast.sum()) == 4.5, "the choices stay as they are"


def test_a_layers_budget_is_a_view_made_when_it_is_asked_for() -> None:
    """Inside an attention call, where nothing may be allocated."""
    values, ints = torch.rand(3, 2), torch.zeros(3, 2).int()
    measured = torch.tensor([True, False, True])
    choices = HeadChoices(values, values, values, ints, ints, values, values, measured)
    policy = SparsePolicy()
    budgets = choices.budgets(policy=policy)
    assert not budgets._made
    budget = budgets[2]
    assert budget is not None and budgets[1] is None and len(budgets) == 3
    assert budgets[-1] is budget and len(budgets._made) == 1
    assert budgets[2] is budget, "its tables are made once"
    assert torch.equal(budget.density, values[2])
    assert budget.density.data_ptr() == budgets.of_all.density[4:].data_ptr()
    assert budget.table(policy).data_ptr() == budgets.of_all.table(policy)[4:].data_ptr()
