# SPDX-License-Identifier: Apache-2.0
"""Best pool weight, found one by one."""

from __future__ import annotations

import numpy as np
import pytest

from sparge.tune.best_pool_weights import best_pool_weights

SHAPE = (3, 2, 4)


@pytest.mark.parametrize("pool_weights", [1, 2, 3])
def test_each_group_has_the_least_of_its_errors(pool_weights: int) -> None:
    errors = np.random.default_rng(1).random((*SHAPE, pool_weights))
    least, best = best_pool_weights(np.moveaxis(errors, -1, 0))
    assert least.shape == best.shape == (*SHAPE, 1 + (pool_weights > 1))
    for place in np.ndindex(*SHAPE):
        own = errors[place]
        for group, of_group in enumerate([range(1), range(1, pool_weights)][: best.shape[-1]]):
            assert best[place][group] == min(of_group, key=own.__getitem__)
            assert least[place][group] == own[best[place][group]]


def test_the_earlier_of_equal_ones_is_taken_and_what_is_not_finite_is_not() -> None:
    nan, inf = np.nan, np.inf
    errors = np.array([[0.3, 0.2, 0.2], [nan, nan, 0.2], [0.1, 0.2, inf], [inf, inf, inf]])
    least, best = best_pool_weights(np.moveaxis(errors, -1, 0))
    assert best.tolist() == [[0, 1], [0, 2], [0, 1], [0, 1]]
    assert least.tolist() == [[0.3, 0.2], [inf, 0.2], [0.1, 0.2], [inf, inf]]
