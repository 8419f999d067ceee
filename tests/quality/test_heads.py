# SPDX-License-Identifier: Apache-2.0
"""What is said of the heads of judged clips."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quality.heads import JudgedHeads


def clip(found: list[list[float]], dropped: float = 0.1) -> JudgedHeads:
    """One of two steps, one layer and as many heads as each step has errors; .1 is expected."""
    errors = torch.tensor(found, dtype=torch.float64).view(1, 2, 1, -1)
    return JudgedHeads(errors, torch.full_like(errors, 0.1), torch.full_like(errors, dropped))


def test_heads_are_judged_by_their_means_over_the_steps() -> None:
    shares = clip([[0.1, 0.05, 0.2], [0.1, 0.2, 0.2]]).shares()
    assert shares["calls_within"] == pytest.approx(2 / 6)
    assert shares["heads_within"] == pytest.approx(2 / 3), "the second in the mean alone"
    assert shares["no_worse_than_drop"] == pytest.approx(1 / 3)
    assert shares["worst_to_drop"] == pytest.approx(2)
    assert "reached" not in shares


@pytest.mark.parametrize(
    ("target", "reached", "near"),
    [(0.05, 0.0, 0.0), (0.07, 1 / 3, 1 / 3), (0.085, 2 / 3, 2 / 3), (0.16, 1.0, 2 / 3)],
)
def test_a_head_reached_its_target_within_the_promised_factor(
    target: float, reached: float, near: float
) -> None:
    shares = clip([[0.1, 0.05, 0.2], [0.1, 0.2, 0.2]]).shares(target)
    assert shares["reached"] == pytest.approx(reached)
    assert shares["near_target"] == pytest.approx(near), "much better is not near"


def test_a_head_may_be_bad_in_one_clip_and_good_in_all() -> None:
    one, other = clip([[0.2, 0.05], [0.2, 0.05]]), clip([[0.06, 0.05], [0.06, 0.05]], 0.2)
    shares = JudgedHeads.of_clips([one, other]).shares()
    assert shares["worst_to_drop"] == pytest.approx(2)
    assert shares["worst_to_drop_of_clips"] == pytest.approx(0.26 / 0.3)
    assert shares["no_worse_than_drop"] == 0.75
