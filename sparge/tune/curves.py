# SPDX-License-Identifier: Apache-2.0
"""Error over density: falling, like that of the layer's other heads, read between densities.

Errors are float64 arrays (layers, heads, ..., densities, pool weights), the last density being 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Query blocks of a head that weigh as much as the shape shared by all heads of its layer
#: (docs/experiments.md, Shape shared by a layer's heads).
SHARED_SHAPE_WEIGHT = 1.0
LEAST = 1e-6  # keeps the logarithm of an error of 0 a number, far below the 8-bit error of 4e-3


def steady(errors: Array, blocks_measured: NDArray[np.int64]) -> Array:
    """Errors that fall with density, the shape of their fall drawn towards the layer's mean.

    blocks_measured: (layers,) query blocks measured of each head. Each (head, ..., pool weight)
    keeps its own level, so what a pool weight does to one head never follows from what it does to
    others.
    """
    falling = fall(errors)
    inner = np.log(np.maximum(falling[..., :-1, :], LEAST))
    level = inner.mean(-2, keepdims=True)
    shared = (inner - level).mean(1, keepdims=True)
    own = blocks_measured / (blocks_measured + SHARED_SHAPE_WEIGHT)
    own = own.reshape(-1, *[1] * (errors.ndim - 1))
    drawn = np.exp(level + own * (inner - level) + (1 - own) * shared)
    return np.concatenate([np.maximum(drawn, falling[..., -1:, :]), falling[..., -1:, :]], -2)


def fall(errors: Array) -> Array:
    """The nearest non-increasing errors over density, in squares (isotonic regression).

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
    way to the next lies before it; as in `errors_between`."""
    left = np.minimum(np.searchsorted(densities, wanted, side="right") - 1, len(densities) - 2)
    gap = densities[left + 1] - densities[left]
    return left, np.divide(wanted - densities[left], gap, out=np.ones_like(gap), where=gap > 0)


def errors_between(errors: Array, densities: Array, wanted: Array) -> Array:
    """Errors (..., wanted densities) from errors (..., densities), a new array.

    Both lists of densities ascend. No wanted density is below the first measured one, and of
    measured ones that are equal the last counts. The logarithm is interpolated linearly, as errors
    fall about exponentially with density; up to density 1, where the error may be 0, the error
    itself.
    """
    left, share = places_between(densities, wanted)
    places = np.arange(len(wanted))
    weights = np.zeros((len(densities), len(wanted)))
    weights[left, places] = 1 - share
    weights[left + 1, places] = share
    inner = np.count_nonzero(left < len(densities) - 2)
    found = np.empty((*errors.shape[:-1], len(wanted)))
    np.matmul(np.log(np.maximum(errors, LEAST)), weights[:, :inner], out=found[..., :inner])
    np.exp(found[..., :inner], out=found[..., :inner])
    np.matmul(errors, weights[:, inner:], out=found[..., inner:])
    return found
