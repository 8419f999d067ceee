# SPDX-License-Identifier: Apache-2.0
"""Counts of a pass belong to the layer that made them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

ROWS = 3


@pytest.fixture
def passes(load_pack) -> Any:
    return load_pack("sparge.tune.records")


def count(record: Any, row: int, kept: int, valid: int) -> None:
    """Adds to the counters as a call does."""
    record.stats_of(row).counters += torch.tensor([kept, valid, 0, 1])


def test_each_layer_has_counters_of_its_own(passes) -> None:
    records = [passes.PassRecord.begin(step, ROWS, torch.device("cpu"), True) for step in range(2)]
    for step, record in enumerate(records):
        for row in range(ROWS):
            count(record, row, 10 * (row + 1) + step, 100)
    densities = passes.Densities.of(records)
    expected = torch.tensor([[0.10, 0.11], [0.20, 0.21], [0.30, 0.31]])
    torch.testing.assert_close(densities.by_step, expected)
    assert densities.overall == pytest.approx(0.205)


def test_layers_past_the_last_row_count_there(passes) -> None:
    record = passes.PassRecord.begin(0, ROWS, torch.device("cpu"), True)
    count(record, ROWS - 1, 10, 100)
    count(record, ROWS + 4, 50, 100)
    by_step = passes.Densities.of([record]).by_step
    assert by_step[:2].isnan().all()
    assert float(by_step[2, 0]) == pytest.approx(0.3)
