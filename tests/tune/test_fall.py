# SPDX-License-Identifier: Apache-2.0
"""Mean densities that fall from step to step, with the mean that was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from sparge.tune.step_settings import fall_of, step_means


@pytest.mark.parametrize("mean", [0.05, 0.1, 0.2, 0.3, 0.45])
@pytest.mark.parametrize("steps", [2, 3, 16])
@pytest.mark.parametrize("least", [0.0, 0.03])
def test_the_mean_over_steps_is_what_was_asked_for(mean: float, steps: int, least: float) -> None:
    means = np.array(step_means(mean, steps, least))
    assert len(means) == steps
    assert (np.diff(means) < 0).all()
    assert means.mean() == pytest.approx(mean)
    assert least < means[-1] < means[0] <= 1


@pytest.mark.parametrize(
    ("mean", "fall"), [(0.1, 0.6), (0.2, 0.45), (0.3, 0.3), (0.5, 0), (0.9, 0)]
)
def test_the_denser_the_less_it_falls(mean: float, fall: float) -> None:
    assert fall_of(mean) == pytest.approx(fall, abs=1e-9)
    means = step_means(mean, 16)
    assert (means[0] / mean - 1, 1 - means[-1] / mean) == pytest.approx((fall, fall), abs=1e-9)


@pytest.mark.parametrize(
    ("mean", "steps", "least"), [(0.2, 1, 0.0), (0.6, 16, 0.0), (0.1, 16, 0.12)]
)
def test_all_steps_alike(mean: float, steps: int, least: float) -> None:
    assert step_means(mean, steps, least) == [mean]
