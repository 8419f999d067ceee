# SPDX-License-Identifier: Apache-2.0
"""The output scale of sums over rows, against the rows."""

from __future__ import annotations

import numpy as np
import pytest

from sparge.tune.output_scale import UNSURE, Array, best_output_scales

LIMITS = (0.5, 2.0)


def sums_of(out: Array, truth: Array, mean: Array) -> tuple[Array, Array, Array]:
    """Sums of rows (candidates, rows, channels), (rows, channels) and (channels,)."""
    error, lack = out - truth, mean - truth
    return (error**2).sum((1, 2)), (error * lack).sum((1, 2)), np.asarray((lack**2).sum())


@pytest.fixture
def rows() -> tuple[Array, Array, Array]:
    """Outputs drawn towards the mean value, drawn apart, too near and too far for the limits."""
    drawn = np.random.default_rng(5)
    truth, mean = drawn.normal(size=(40, 8)), drawn.normal(size=8)
    factors = np.array([0.7, 1.4, 0.1, 9.0])[:, None, None]
    noise = 0.1 * drawn.normal(size=(4, 40, 8))
    return mean + factors * (truth - mean + noise), truth, mean


def test_it_gives_outputs_their_distance_from_the_mean_back(rows) -> None:
    out, truth, mean = rows
    output_scale, squared = best_output_scales(*sums_of(*rows), LIMITS)
    changed = mean + output_scale[:, None, None] * (out - mean)
    far = ((truth - mean) ** 2).sum()
    expected = ((changed - truth) ** 2).sum((1, 2)) + (UNSURE * np.log(output_scale)) ** 2 * far
    np.testing.assert_allclose(squared, expected)
    spread = [np.linalg.norm(x - mean) for x in (*changed[:2], truth)]
    assert spread[:2] == pytest.approx([spread[2]] * 2)
    assert output_scale[2:].tolist() == [2.0, 0.5]


def test_without_limits_to_choose_from_there_is_none(rows) -> None:
    error, towards, far = sums_of(*rows)
    output_scale, squared = best_output_scales(error, towards, far, (1.0, 1.0))
    assert output_scale.tolist() == [1.0] * 4
    np.testing.assert_allclose(squared, error)


def test_what_has_no_distance_has_output_scale_1() -> None:
    zero, one = np.zeros(1), np.ones(1)
    for sums in ((zero, zero, zero), (one, zero, zero), (one, one, one)):
        output_scale, squared = best_output_scales(*sums, LIMITS)
        assert output_scale.item() == 1 and squared == sums[0]


def test_what_is_not_finite_stays_so() -> None:
    bad = np.array([np.nan, np.inf])
    assert not np.isfinite(best_output_scales(bad, np.zeros(2), np.ones(2), LIMITS)[1]).any()
