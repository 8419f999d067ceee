# SPDX-License-Identifier: Apache-2.0
"""What stands best for dropped blocks among all that costs the same: budgets choose between costs.

All backgrounds cost nothing, like plain dropping, and all gains of the residual the same.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .candidates import Kind

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class Group(enum.IntEnum):
    """Places along the last axis of `best_kinds`."""

    FREE = 0
    """Plain dropping or a background."""
    POOLED = 1
    """Missing where there is no gain above 0."""


def best_kinds(errors: Array, kinds: Sequence[Kind]) -> tuple[Array, Indices]:
    """(..., kinds) to (..., groups), twice: the least error of all kinds that pool nothing, then of
    those that pool, where there are such; and the places of those kinds.

    The earlier of equal kinds is taken, so plain dropping wins a tie. Where no error is finite the
    first kind is taken, with an infinite one.
    """
    pools = np.array([kind.gain > 0 for kind in kinds])
    groups = [places for places in map(np.flatnonzero, (~pools, pools)) if places.size]
    shape = (*errors.shape[:-1], len(groups))
    least, best = np.full(shape, np.inf), np.empty(shape, np.int64)
    for group, places in enumerate(groups):
        best[..., group] = places[0]
        # One by one takes a third of argmin's time over so short an axis.
        for place in places:
            better = errors[..., place] < least[..., group]  # never so of NaN
            np.copyto(least[..., group], errors[..., place], where=better)
            np.copyto(best[..., group], place, where=better)
    return least, best
