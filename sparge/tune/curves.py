# SPDX-License-Identifier: Apache-2.0
"""Error over density: falling, and read between measured densities.

Errors are float64 arrays of which the last density is 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAST = 1e-6  # keeps the logarithm of an error of 0 a number, far below the 8-bit error of 4e-3


def fall(errors: Array) -> Array:
    """The nearest non-increasing errors (..., densities, pool weights) over density, in squares
    (isotonic regression).

    By its max-min form: the least, over starts up to here, of the greatest mean from there to an
    end from here on.
    """
    values = np.moveaxis(errors, -2, 0)
    sums = np.concatenate([np.zeros_like(values[:1]), values.cumsum(0)])
    best = np.full_like(values, np.inf)
    for start in range(len(values)):
        greatest = np.full_like(values[0], -np.inf)
        for end in range(len(values), start, -1):
            mean = (sums[end] - sums[start]) / (end - start)
            greatest = np.maximum(greatest, mean)
            best[end - 1] = np.minimum(best[end - 1], greatest)
    return np.moveaxis(best, 0, -2)


def places_between(densities: Array, wanted: Array) -> tuple[NDArray[np.int64], Array]:
    """Indices of the measured densities below each wanted one, never the last, and how much of the
    way to the next lies before it; as in `logs_between`."""
    left = np.minimum(np.searchsorted(densities, wanted, side="right") - 1, len(densities) - 2)
    gap = densities[left + 1] - densities[left]
    return left, np.divide(wanted - densities[left], gap, out=np.ones_like(gap), where=gap > 0)


def logs_between(errors: Array, densities: Array, wanted: Array) -> Array:
    """Natural logarithms of errors (..., densities) at the `wanted` densities. -inf for an error of
    0.

    Both lists of densities ascend. No wanted density is below the first measured one, and of
    measured ones that are equal the last counts. The logarithm is interpolated linearly, as errors
    fall about exponentially with density; up to density 1, where the error may be 0, the error
    itself.
    """
    last = len(densities) - 1
    left, share = places_between(densities, wanted)

    def straight(values: Array, part: slice) -> Array:
        low, high = values[..., left[part]], values[..., left[part] + 1]
        return (1 - share[part]) * low + share[part] * high

    inner = np.count_nonzero(left < last - 1)
    logarithmic = straight(np.log(np.maximum(errors, LEAST)), slice(inner))
    with np.errstate(divide="ignore"):
        others = np.log(straight(errors, slice(inner, None)))
    return np.concatenate([logarithmic, others], -1)
