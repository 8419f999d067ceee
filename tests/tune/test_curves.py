# SPDX-License-Identifier: Apache-2.0
"""Error curves: isotonic, drawn together by layer, read between measured densities."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from sparge.tune.curves import errors_between, fall, steady


def nearest_falling(errors: np.ndarray) -> np.ndarray:
    """The best of all cuts into runs, each of its mean, whose means fall."""
    best, least = errors, np.inf
    for cuts in range(len(errors)):
        for places in combinations(range(1, len(errors)), cuts):
            runs = np.split(errors, places)
            means = [run.mean() for run in runs]
            levels = np.concatenate([np.full(len(run), run.mean()) for run in runs])
            distance = ((levels - errors) ** 2).sum()
            if distance < least and all(a >= b for a, b in pairwise(means)):
                best, least = levels, distance
    return best


def test_fall_is_the_nearest_falling_curve(seed: int) -> None:
    errors = np.random.default_rng(seed).random((2, 3, 2, 6, 4))
    found = fall(errors)
    for index in np.ndindex(2, 3, 2):
        for pool_weight in range(4):
            expected = nearest_falling(errors[index][:, pool_weight])
            np.testing.assert_allclose(found[index][:, pool_weight], expected)


def test_many_samples_speak_for_themselves(seed: int) -> None:
    errors = np.random.default_rng(seed).random((2, 3, 2, 5, 4))
    found = steady(errors, np.array([10**9] * 2))
    np.testing.assert_allclose(found, fall(errors), rtol=1e-6)


def test_few_samples_take_the_shape_of_the_layer_and_keep_their_level() -> None:
    steep, flat = np.array([0.8, 0.2, 0.05, 0.0]), np.array([0.4, 0.4, 0.4, 0.0])
    errors = np.stack([steep, flat])[None, :, None, :, None]
    errors = np.concatenate([errors, errors])
    found = steady(errors, np.array([1, 3]))
    inner = np.log(errors[0, :, 0, :3, 0])
    level = inner.mean(1, keepdims=True)
    shape = (inner - level).mean(0)
    for layer, own in ((0, 0.5), (1, 0.75)):
        expected = np.exp(level + own * (inner - level) + (1 - own) * shape)
        np.testing.assert_allclose(found[layer, :, 0, :3, 0], expected)
    assert not found[..., -1, :].any(), "nothing dropped, no error"


def test_what_a_pool_weight_does_to_one_head_says_nothing_of_another() -> None:
    helped = np.array([[0.4, 0.1], [0.2, 0.05], [0.0, 0.0]])
    ruined = np.array([[0.4, 1.6], [0.2, 0.8], [0.0, 0.0]])
    errors = np.stack([helped] * 9 + [ruined])[None, :, None]
    np.testing.assert_allclose(steady(errors, np.array([1])), errors)


def test_between_is_exponential_and_straight_at_the_end() -> None:
    densities = np.array([0.1, 0.2, 0.4, 1.0])
    errors = np.array([0.8, 0.4, 0.1, 0.0])
    wanted = np.array([0.1, 0.15, 0.3, 0.4, 0.7, 1.0])
    found = errors_between(errors, densities, wanted)
    assert found == pytest.approx([0.8, (0.8 * 0.4) ** 0.5, 0.2, 0.1, 0.05, 0.0])


def test_equal_densities_count_once() -> None:
    densities = np.array([0.5, 0.5, 1.0, 1.0])
    wanted = np.array([0.5, 0.75, 1.0])
    found = errors_between(np.array([0.9, 0.3, 0.0, 0.0]), densities, wanted)
    assert np.isfinite(found).all()
    assert found[[0, 2]] == pytest.approx([0.3, 0.0])
