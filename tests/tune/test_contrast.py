# SPDX-License-Identifier: Apache-2.0
"""The contrast of sums over rows, against the rows."""

from __future__ import annotations

import numpy as np
import pytest

from sparge.tune.contrast import UNSURE, Array, best_contrasts

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
    contrast, squared = best_contrasts(*sums_of(*rows), LIMITS)
    changed = mean + contrast[:, None, None] * (out - mean)
    far = ((truth - mean) ** 2).sum()
    expected = ((changed - truth) ** 2).sum((1, 2)) + (UNSURE * np.log(contrast)) ** 2 * far
    np.testing.assert_allclose(squared, expected)
    spread = [np.linalg.norm(x - mean) for x in (*changed[:2], truth)]
    assert spread[:2] == pytest.approx([spread[2]] * 2)
    assert contrast[2:].tolist() == [2.0, 0.5]


def test_without_limits_to_choose_from_there_is_none(rows) -> None:
    error, towards, far = sums_of(*rows)
    contrast, squared = best_contrasts(error, towards, far, (1.0, 1.0))
    assert contrast.tolist() == [1.0] * 4
    np.testing.assert_allclose(squared, error)


def test_what_has_no_distance_has_contrast_1() -> None:
    zero, one = np.zeros(1), np.ones(1)
    for sums in ((zero, zero, zero), (one, zero, zero), (one, one, one)):
        contrast, squared = best_contrasts(*sums, LIMITS)
        assert contrast.item() == 1 and squared == sums[0]


def test_what_is_not_finite_stays_so() -> None:
    bad = np.array([np.nan, np.inf])
    assert not np.isfinite(best_contrasts(bad, np.zeros(2), np.ones(2), LIMITS)[1]).any()
