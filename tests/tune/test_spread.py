# SPDX-License-Identifier: Apache-2.0
"""Rows of a query block that stand for all of them."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch.nn.functional import normalize

from sparge.order.grid import TokenGrid, cube_order, grid_order
from sparge.tune import Workload
from sparge.tune.spread import ROW_STEP, spread_rows
from tests.tune.begun import begin

ROOM = TokenGrid(9, 12, 16)


@pytest.mark.parametrize("step", [1, 2, 4, 8, 16])
def test_one_row_of_every_few_and_all_columns_of_a_cube_alike(step: int) -> None:
    rows = torch.tensor(spread_rows(step))
    assert rows.tolist() == sorted(rows.tolist())
    assert torch.equal(rows // step, torch.arange(128 // step))
    assert (rows % 4).bincount(minlength=4).tolist() == [128 // step // 4] * 4


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("variant", [0, 1, 2])
@pytest.mark.parametrize("grid", [(13, 30, 45), (21, 30, 52), (28, 30, 53), (21, 34, 30)])
def test_rows_lie_at_the_edges_of_cubes_as_often_as_others(grid, variant: int, step: int) -> None:
    """A head that looks to one side, or to one corner, errs there."""
    order = cube_order(TokenGrid(*grid), variant)
    token, slot = order.slot_token.long(), torch.arange(order.slots)
    held, block = token >= 0, slot // 64
    sampled = torch.isin(slot % 128, torch.tensor(spread_rows(step)))[held]
    place = torch.stack(torch.unravel_index(token[held], grid))
    block = block[held]
    ends = torch.zeros(2, 3, int(block.max()) + 1, dtype=torch.long)
    for end, reduce in zip(ends, ("amin", "amax"), strict=True):
        for of_axis, where in zip(end, place, strict=True):
            of_axis.scatter_reduce_(0, block, where, reduce, include_self=False)
    at_edge = [place[axis] == end[axis][block] for end in ends for axis in range(3)]
    pairs = [one | other for one, other in combinations(at_edge, 2)]
    for edge in (*at_edge, *pairs):
        share = float(sampled[edge].double().mean() * step)
        assert share == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("variant", "ahead"), [(0, (1, 0, 0)), (1, (0, 1, 0)), (2, (0, 0, 1))])
def test_a_head_that_looks_to_one_side(generator, variant, ahead) -> None:
    """It errs at one edge of its cubes."""
    places = torch.randn(ROOM.frames, ROOM.height, ROOM.width, 64, generator=generator)
    keys = 8 * normalize(places, dim=-1)
    queries = keys.roll([-step for step in ahead], (0, 1, 2))
    q, k = (x.view(1, 1, ROOM.tokens, 64) for x in (4 * queries, keys))
    v = torch.randn(1, 1, ROOM.tokens, 64, generator=generator)
    workload = Workload(grid_order(ROOM, variant))
    few, all_rows = (begin(heads=1, workload=workload, row_step=step) for step in (ROW_STEP, 1))
    for measurement in (few, all_rows):
        measurement.add(0, q, k, v)
    found, expected = (x.fetched.errors_and_scales()[0][0, 0, 0, 0, 0] for x in (few, all_rows))
    assert expected > 0.1
    assert found == pytest.approx(expected, rel=0.15)
