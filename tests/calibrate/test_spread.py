# SPDX-License-Identifier: Apache-2.0
"""Rows of a query block that stand for all of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from sparge.calibrate import Workload
from sparge.calibrate.spread import spread_rows
from sparge.plan import TokenGrid, grid_order
from tests.calibrate.begun import begin

ROOM = TokenGrid(9, 12, 16)


@pytest.mark.parametrize("step", [1, 2, 4, 8, 16])
def test_one_row_of_every_few_and_all_columns_of_a_cube_alike(step: int) -> None:
    rows = torch.tensor(spread_rows(step))
    assert rows.tolist() == sorted(rows.tolist())
    assert torch.equal(rows // step, torch.arange(128 // step))
    assert (rows % 4).bincount(minlength=4).tolist() == [128 // step // 4] * 4


@pytest.mark.parametrize("row_step", [2, 4])
@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("ahead", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_head_that_looks_to_one_side(generator, row_step, turn, ahead) -> None:
    """It errs at one edge of its cubes."""
    places = torch.randn(ROOM.frames, ROOM.height, ROOM.width, 64, generator=generator)
    keys = 8 * normalize(places, dim=-1)
    queries = keys.roll([-step for step in ahead], (0, 1, 2))
    q, k = (x.view(1, 1, ROOM.tokens, 64) for x in (4 * queries, keys))
    v = torch.randn(1, 1, ROOM.tokens, 64, generator=generator)
    workload = Workload(grid_order(ROOM, turn))
    few, all_rows = (begin(heads=1, workload=workload, row_step=step) for step in (row_step, 1))
    for calibration in (few, all_rows):
        calibration.sample(0, q, k, v)
    found, expected = (x.relative_errors()[0, 0, 0, :, 0, 0] for x in (few, all_rows))
    assert (expected > 0.1).all()
    assert found == pytest.approx(expected, rel=0.15)
