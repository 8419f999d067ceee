# SPDX-License-Identifier: Apache-2.0
"""Best kind of each group, found one by one."""

from __future__ import annotations

import numpy as np
import pytest

from sparge.tune import CandidateSet
from sparge.tune.best_kinds import best_kinds

SHAPE = (3, 2, 4)


@pytest.mark.parametrize("gains", [(0.0,), (0.0, 0.5, 1.0)])
@pytest.mark.parametrize("backgrounds", [(), (0.5, 4.0)])
def test_each_group_has_the_least_of_its_errors(gains, backgrounds) -> None:
    kinds = CandidateSet(gains=gains, backgrounds=backgrounds).kinds
    errors = np.random.default_rng(1).random((*SHAPE, len(kinds)))
    least, best = best_kinds(np.moveaxis(errors, -1, 0), kinds)
    assert least.shape == best.shape == (*SHAPE, 1 + (len(gains) > 1))
    for place in np.ndindex(*SHAPE):
        own = errors[place]
        for group, pools in enumerate([False, True][: best.shape[-1]]):
            of_group = [i for i, kind in enumerate(kinds) if (kind.gain > 0) == pools]
            assert best[place][group] == min(of_group, key=own.__getitem__)
            assert least[place][group] == own[best[place][group]]


def test_the_earlier_of_equal_ones_is_taken_and_what_is_not_finite_is_not() -> None:
    kinds = CandidateSet(gains=(0.0, 0.5, 1.0), backgrounds=(0.5, 4.0)).kinds
    nan, inf = np.nan, np.inf
    errors = np.array(
        [
            [0.3, 0.3, 0.3, 0.2, 0.2],
            [nan, inf, 0.3, nan, 0.2],
            [0.3, 0.1, nan, 0.2, inf],
            [inf, inf, inf, inf, inf],
        ]
    )
    least, best = best_kinds(np.moveaxis(errors, -1, 0), kinds)
    assert best.tolist() == [[0, 3], [2, 4], [1, 3], [0, 3]]
    expected = [[0.3, 0.2], [0.3, 0.2], [0.1, 0.2], [inf, inf]]
    assert least.tolist() == expected
