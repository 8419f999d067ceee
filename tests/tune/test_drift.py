# SPDX-License-Identifier: Apache-2.0
"""Drift that probes find in one token order of a head, and what is expected of all orders."""

from __future__ import annotations

import pytest
import torch

from sparge.tune.drift import SHARED, TREND, Drift, Seen

CUBES, ROWS = 0, 2
WALKS = [CUBES, ROWS]


def of_head(values: torch.Tensor | None) -> list[float]:
    """Values of the head, one for each token order."""
    assert values is not None
    return values[0, 0].tolist()


def seen(*walks: int, visited: list[bool] | None = None) -> Seen:
    """Facts about one head of one layer, by step; all steps were visited where it is not said."""
    looked_at = torch.tensor([visited or [True] * len(walks)])
    middle = torch.tensor([float(looked_at[0].nonzero().float().mean())])
    return Seen(torch.tensor(walks, dtype=torch.int32).view(1, -1, 1), looked_at, middle)


def find(drift: Drift, times: float, walk: int) -> None:
    """Finds drift in three steps of one token order."""
    drift.find(torch.tensor([[times]]), seen(*[walk] * 3), 3)


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
    drift.find(torch.tensor([[4.0]]), seen(CUBES, ROWS, CUBES), 3)
    assert of_head(drift.grown) == [4, 4]


def test_a_walk_that_nobody_looked_at_shares_a_part():
    drift = Drift(WALKS)
    drift.find(torch.tensor([[4.0]]), seen(CUBES, ROWS, ROWS, visited=[False, True, True]), 3)
    assert of_head(drift.grown) == [4**SHARED, 4]


def test_what_was_seen_late_has_less_way_to_come():
    early, late = Drift(WALKS), Drift(WALKS)
    early.find(torch.tensor([[4.0]]), seen(*[ROWS] * 4, visited=[True, True, False, False]), 4)
    late.find(torch.tensor([[4.0]]), seen(*[ROWS] * 4, visited=[False, False, True, True]), 4)
    # Samples are of 0.5 and 2.5, measured was at -1, and the middle of the next steps is 5.5.
    assert of_head(early.ahead)[1] == pytest.approx(4 ** (1 + TREND * 5 / 1.5))
    assert of_head(late.ahead)[1] == pytest.approx(4 ** (1 + TREND * 3 / 3.5))
