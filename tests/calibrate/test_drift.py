# SPDX-License-Identifier: Apache-2.0
"""What probes find in one walk of a head, and what is expected of all of them."""

from __future__ import annotations

import pytest
import torch

from sparge.calibrate.drift import SHARED, TREND, Drift

CUBES, ROWS = 0, 2
WALKS = [CUBES, ROWS]


def of_head(values: torch.Tensor | None) -> list[float]:
    """Of each walk."""
    assert values is not None
    return values[0, 0].tolist()


def find(drift: Drift, times: float, walk: int, steps: int = 3) -> None:
    """In one layer of one head."""
    drift.find(torch.tensor([[times]]), [torch.tensor([[walk]], dtype=torch.int32)], steps)


def test_nothing_is_expected_before_anything_was_found():
    assert Drift(WALKS).ahead is None


def test_other_walks_share_a_part_and_all_go_on_as_they_went():
    drift = Drift(WALKS)
    find(drift, 4.0, ROWS)
    assert of_head(drift.grown) == [4**SHARED, 4]
    on = TREND * 6 / 4  # from the last dense step to the middle of three steps, and as far again
    expected = [4 ** (SHARED * (1 + on)), 4 ** (1 + on)]
    assert of_head(drift.ahead) == pytest.approx(expected)


def test_what_is_found_is_of_what_was_expected():
    drift = Drift(WALKS)
    find(drift, 2.0, ROWS)
    _, ahead = of_head(drift.ahead)
    find(drift, 3 / ahead, ROWS)  # three times as large as measured: half more than before
    assert of_head(drift.grown) == pytest.approx([3**SHARED, 3])
    assert of_head(drift.ahead) == pytest.approx(
        [3**SHARED * 1.5 ** (SHARED * TREND), 3 * 1.5**TREND]
    )


def test_a_head_that_took_another_walk_goes_on_from_what_was_guessed_of_it():
    drift = Drift(WALKS)
    find(drift, 4.0, ROWS)
    (guessed, _), (expected, _) = of_head(drift.grown), of_head(drift.ahead)
    find(drift, guessed / expected, CUBES)  # neither more nor less than guessed
    assert of_head(drift.grown) == pytest.approx([guessed, 4])
    assert of_head(drift.ahead) == pytest.approx(of_head(drift.grown))


def test_a_head_that_took_both_walks_drifts_in_both():
    drift = Drift(WALKS)
    walks = [torch.tensor([[walk]], dtype=torch.int32) for walk in WALKS]
    drift.find(torch.tensor([[4.0]]), walks, 3)
    assert of_head(drift.grown) == [4, 4]
