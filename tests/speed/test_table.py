# SPDX-License-Identifier: Apache-2.0
"""Seconds from sizes, and tables that are stored and read."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from sparge.speed import TORCH, timing
from sparge.speed.table import Cost, Size, SpeedTable, Times
from sparge.speed.timing import DENSITY, GRIDS, HEADS, OTHER_DENSITY, Cell, fit, misfit

SIZE = Size(10_000, 20, 128)
EXACT = Cost(host=1e-4, launch=1e-4, token=0.0, pair=1e-12)
EIGHT_BIT = Cost(host=1e-4, launch=1e-4, token=1e-9, pair=4e-13)
SPARSE = Cost(host=6e-4, launch=2e-4, token=2e-9, pair=5e-13)
TIMES = Times(EXACT, EIGHT_BIT, SPARSE, margin=0.1)
TABLE = SpeedTable({"gpu": "some"}, "2026-01-01T00:00:00+00:00", {64: TIMES, 128: TIMES})


def test_eight_bit_dense_has_to_be_faster_by_the_margin() -> None:
    seconds = EXACT.seconds(SIZE)
    for factor, faster in ((1.09, False), (1.11, True)):
        eight_bit = Cost(0.0, seconds / factor, 0.0, 0.0)
        times = Times(EXACT, eight_bit, SPARSE, margin=0.1)
        assert times.eight_bit_is_faster(SIZE) == faster


@pytest.mark.parametrize("pooled", [0.0, 0.5])
def test_a_density_within_some_seconds(pooled: float) -> None:
    density = TIMES.sparse_density_within(SIZE, 2e-3, pooled)
    assert TIMES.sparse_seconds(SIZE, density, pooled) == pytest.approx(2e-3 / 1.1)
    fast = Times(EXACT, EIGHT_BIT, Cost(6e-4, 0.0, 0.0, 1e-15), margin=0.0)
    assert fast.sparse_density_within(SIZE, 2.9e-4, pooled) == 0.0, "the host takes longer"
    assert fast.sparse_density_within(SIZE, 3.1e-4, pooled) > 1
    assert TIMES.sparse_density_within(SIZE, 5e-4, pooled) == 0.0, "tokens alone take longer"
    free = Times(EXACT, EIGHT_BIT, Cost(0.0, 0.0, 0.0, 0.0), margin=0.1)
    assert free.sparse_density_within(SIZE, 1.0, pooled) == math.inf


def test_a_fit_finds_the_rates_and_how_far_it_is_off() -> None:
    sizes = [Size(grid.tokens, HEADS, 128) for grid in GRIDS]
    shares = [(size, DENSITY) for size in sizes] + [(sizes[-1], OTHER_DENSITY)]
    cells = [Cell(size, share, SPARSE.gpu(size, share), 3e-4) for size, share in shares]
    found = fit(cells, of_tokens=True)
    assert np.allclose([found.host, found.launch], [3e-4, 2e-4])
    assert np.allclose([found.token, found.pair], [2e-9, 5e-13])
    assert misfit(found, cells) < 1e-6
    exact = [
        Cell(size, 1.0, EXACT.gpu(size) * off, 1e-4)
        for size, off in zip(sizes, (1, 1.1, 1), strict=True)
    ]
    found = fit(exact, of_tokens=False)
    assert found.token == 0 and 0.03 < misfit(found, exact) < 0.1


def test_no_rate_is_below_zero() -> None:
    """Time that falls with the length: noise."""
    sizes = [Size(grid.tokens, HEADS, 128) for grid in GRIDS]
    cells = [Cell(size, 1.0, 1e-3 - 1e-9 * size.tokens, 1e-4) for size in sizes]
    found = fit(cells, of_tokens=True)
    assert min(found.launch, found.token, found.pair) >= 0 and found.launch > 0


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, 11.0, "1", None, []])
def test_a_stored_table_is_the_same_and_what_is_none_is_refused(value: Any) -> None:
    assert SpeedTable.from_json(TABLE.to_json()) == TABLE
    assert TABLE.of(128) == TIMES and TABLE.of(96) is None
    for *outer, name in (("exact", "pair"), ("sparse", "host"), ("margin",)):
        stored: Any = copy.deepcopy(TABLE.to_json())
        times = stored["head_dims"]["64"]
        (times[outer[0]] if outer else times)[name] = value
        with pytest.raises((ValueError, TypeError)):
            SpeedTable.from_json(stored)
    created = [{**TABLE.to_json(), "created": when} for when in ("soon", "2026-01-01T00:00:00", 3)]
    for other in (None, [], {}, {"head_dims": []}, {"head_dims": {"x": {}}}, *created):
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
            SpeedTable.from_json(other)


def test_the_callers_autocast_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would copy all inputs of exact calls to another dtype, and the table is kept for good."""
    seen: list[bool] = []

    def times(*_: object) -> Times:
        seen.append(torch.is_autocast_enabled("cuda"))
        return TIMES

    monkeypatch.setattr(timing, "_times", times)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    torch.set_autocast_enabled("cuda", True)
    try:
        timing.measure_speed(torch.device("cuda", 0), TORCH, {})
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert seen == [False, False]
