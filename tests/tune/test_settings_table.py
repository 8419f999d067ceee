# SPDX-License-Identifier: Apache-2.0
"""Facts that head settings share with the settings they come from, and places that measurements
take."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparge import Router
from sparge.policy import SparsePolicy
from sparge.stages.thresholds import COLUMNS
from sparge.tune import SettingsTable
from tests.tune.begun import GRID, begin


def test_a_budget_shares_nothing_with_the_choices(make_qkv) -> None:
    measurement = begin(heads=2)
    measurement.add(0, *make_qkv(1, 2, GRID.tokens, 16))
    settings = measurement.error_table().choose(mean_density=0.6)
    before = settings.density.clone()
    head_settings = settings.head_settings(0)
    assert head_settings is not None
    assert head_settings.pools and set(head_settings.router.tolist()) == {Router.ERROR}
    head_settings.density.fill_(1)
    assert torch.equal(settings.density, before)


def test_budgets_keep_the_structure_of_those_before() -> None:
    """What a call allocates depends on the structure, which stays from one step to the next."""
    none, measured = torch.zeros(2, 2), torch.tensor([True, False])
    ints = none.int()
    plain = SettingsTable(none + 0.5, none, none + 1, ints, none, none, measured)
    rich = replace(plain, pool_weight=none + 1, output_scale=none + 1.5, order_kind=ints + 1)
    first, unmeasured = plain.of_layers()
    assert first is not None and unmeasured is None
    assert first.order_kind is None and first.output_scale is None
    after, _ = plain.of_layers(before=rich.of_layers())
    assert after is not None
    assert after.order_kind is not None
    assert not (after.pool_weight.any() or after.order_kind.any()), "its own settings"
    assert after.output_scale is not None and (after.output_scale == 1).all()


def test_all_layers_have_an_output_scale_if_one_head_has() -> None:
    none, measured = torch.zeros(2, 2), torch.ones(2).bool()
    output_scale, ints = torch.tensor([[1.0, 1.0], [1.5, 1.0]]), none.int()
    settings = SettingsTable(none + 0.5, none, output_scale, ints, none, none, measured)
    policy = SparsePolicy()
    for layer, head_settings in enumerate(settings.of_layers(policy=policy)):
        assert head_settings is not None
        assert head_settings.output_scale is not None and torch.equal(
            head_settings.output_scale, output_scale[layer]
        )
        assert torch.equal(
            head_settings.table(policy)[:, COLUMNS.index("output_scale")], output_scale[layer]
        )
        own = replace(head_settings)
        assert torch.equal(head_settings.table(policy), own.table(policy)), "made for all at once"
        head_settings.output_scale.zero_()
    assert float(settings.output_scale.sum()) == 4.5, "the settings stay as they are"


def test_a_layers_budget_is_a_view_made_when_it_is_asked_for() -> None:
    """Inside an attention call, where nothing may be allocated."""
    values, ints = torch.rand(3, 2), torch.zeros(3, 2).int()
    measured = torch.tensor([True, False, True])
    settings = SettingsTable(values, values, values, ints, values, values, measured)
    policy = SparsePolicy()
    budgets = settings.of_layers(policy=policy)
    assert not budgets._made
    head_settings = budgets[2]
    assert head_settings is not None and budgets[1] is None and len(budgets) == 3
    assert budgets[-1] is head_settings and len(budgets._made) == 1
    assert budgets[2] is head_settings, "its tables are made once"
    assert torch.equal(head_settings.density, values[2])
    assert head_settings.density.data_ptr() == budgets.of_all.density[4:].data_ptr()
    assert head_settings.table(policy).data_ptr() == budgets.of_all.table(policy)[4:].data_ptr()
