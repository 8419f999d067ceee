# SPDX-License-Identifier: Apache-2.0
"""Best pool weight (`pool_weight`) of a head, beside plain dropping.

All pool weights above 0 cost the same and plain dropping costs nothing. So the later choice of head
settings is between costs alone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class Group(enum.IntEnum):
    """Indices along the last axis of what `best_pool_weights` returns."""

    DROPPED = 0
    """Plain dropping."""
    POOLED = 1
    """Pooled keys. Missing where there is no pool weight above 0."""


def best_pool_weights(errors: Iterable[Array]) -> tuple[Array, Indices]:
    """Returns the least errors and the indices of the pool weights that make them, each (*shape,
    groups).

    errors: an array of `shape` for each pool weight, plain dropping first, one after another, so
    that they stay in the cache. The earlier of equal pool weights is taken. Where no error is
    finite the first of the group is taken, with an infinite error.
    """
    found: list[tuple[Array, Indices]] = []
    for place, of_pool_weight in enumerate(errors):
        if place <= Group.POOLED:
            found.append(
                (np.full(of_pool_weight.shape, np.inf), np.full(of_pool_weight.shape, place))
            )
        least, best = found[-1]
        better = of_pool_weight < least  # never true of NaN
        np.copyto(least, of_pool_weight, where=better)
        np.copyto(best, place, where=better)
    least, best = (np.stack(of_groups, -1) for of_groups in zip(*found, strict=True))
    return least, best
