# SPDX-License-Identifier: Apache-2.0
"""Figures of the heads of judged clips."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.quality.heads import JudgedHeads


def clip(found: list[list[float]], dropped: float = 0.1) -> JudgedHeads:
    """One of two steps, one layer and as many heads as each step has errors; .1 is expected."""
    errors = torch.tensor(found, dtype=torch.float64).view(1, 2, 1, -1)
    expected, drop = torch.full_like(errors, 0.1), torch.full_like(errors, dropped)
    return JudgedHeads(errors, expected, drop, torch.ones_like(errors))


def test_heads_are_judged_by_their_means_over_the_steps() -> None:
    shares = clip([[0.1, 0.05, 0.2], [0.1, 0.2, 0.2]]).shares()
    assert shares["heads_within"] == pytest.approx(2 / 3), "the second in the mean alone"
    assert shares["no_worse_than_drop"] == pytest.approx(1 / 3)


def test_a_mean_error_counts_heads_by_their_head_weight() -> None:
    loud = torch.tensor([3.0, 1.0, 0.0]).double()
    judged = clip([[0.1, 0.5, 9.0], [0.1, 0.3, 9.0]])
    one = replace(judged, head_weight=loud.expand(1, 2, 1, 3))
    assert one.shares()["mean_error"] == pytest.approx((3 * 0.1 + 0.4) / 4)
    other = replace(one, found=2 * one.found)
    shares = JudgedHeads.of_clips([other, one]).shares()
    assert shares["mean_error"] == pytest.approx(1.5 * 0.175)
    assert shares["worst_mean_error"] == pytest.approx(2 * 0.175)
