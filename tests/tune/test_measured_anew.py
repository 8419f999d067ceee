# SPDX-License-Identifier: Apache-2.0
"""Heads measured once more: what that does not tell comes from the first time."""

from __future__ import annotations

import pytest
import torch

from sparge.order.grid import grid_order
from sparge.tune import Workload
from sparge.tune.fetched_sums import LAYERS_AT_ONCE
from tests.tune.begun import GRID, begin


def test_at_other_query_blocks_it_takes_the_rest_from_the_first(qkv) -> None:
    first = begin(layers=2, blocks_a_call=1)
    first.measure_one_order()
    for layer in range(2):
        first.add(layer, *qkv)
    again = first.anew()
    assert not any(again.blocks_measured) and again.order_kinds == first.order_kinds
    assert again.next_query_blocks(1) == first.next_query_blocks(1)
    again.add(1, *qkv)
    assert not torch.equal(again.squared_error[1], first.squared_error[1])
    found, earlier = again.fetched, first.fetched
    found.fill_from(earlier)
    own = again.squared_error, again.towards_mean, again.squared_norm
    for mine, before, other in zip(found.sums, own, earlier.sums, strict=True):
        assert torch.equal(mine[0], other[0]) and torch.equal(mine[1], before[1])
    assert found.blocks_measured == earlier.blocks_measured
    assert found.error_table().choose(mean_density=0.5).measured.all()


@pytest.mark.parametrize("bad", [[1], [0, 1]], ids=["one layer", "all layers"])
def test_what_is_not_finite_is_not_taken_for_measured(qkv, bad: list[int]) -> None:
    first = begin(layers=2, blocks_a_call=1)
    again = first.anew()
    q, k, v = qkv
    broken = v.clone()
    broken[:, -1, :, 0] = float("nan")
    for layer in range(2):
        first.add(layer, *qkv)
        again.add(layer, q, k, broken if layer in bad else v)
    found, earlier = again.fetched, first.fetched
    found.fill_from(earlier)
    own = again.squared_error, again.towards_mean, again.squared_norm
    for mine, before, other in zip(found.sums, own, earlier.sums, strict=True):
        for layer in range(2):
            assert torch.equal(mine[layer], other[layer] if layer in bad else before[layer])
    assert found.error_table().choose(mean_density=0.5).measured.all()


@pytest.mark.parametrize("one_order", [False, True])
def test_layers_that_were_not_expected_are_measured_as_the_others(qkv, one_order: bool) -> None:
    q, k, v = qkv
    shared = q.shape[1] // k.shape[1]
    whole, tables = (q, *(x.repeat_interleave(shared, 1) for x in (k, v))), []
    for expected in (1, 6):
        workload = Workload(grid_order(GRID))
        measurement = begin(layers=expected, blocks_a_call=1, workload=workload)
        if one_order:
            measurement.measure_one_order()
        for layer in (0, 1, 5, 1):
            measurement.add(layer, *whole)
        assert set(measurement.order_kinds) == {range(1 if one_order else 2)}
        tables.append(measurement.error_table().choose(mean_density=0.5))
    few, enough = tables
    assert few.measured.nonzero().flatten().tolist() == [0, 1, 5]
    for name in ("density", "pool_weight", "output_scale", "order_kind", "error", "head_weight"):
        assert torch.equal(getattr(few, name)[:6], getattr(enough, name)), name


def test_some_groups_of_layers_may_hold_nothing_measured(qkv) -> None:
    measurement = begin(layers=2 * LAYERS_AT_ONCE + 1)
    measurement.add(LAYERS_AT_ONCE, *qkv)
    settings = measurement.error_table().choose(mean_density=0.5)
    assert settings.measured.nonzero().flatten().tolist() == [LAYERS_AT_ONCE]
