# SPDX-License-Identifier: Apache-2.0
"""The choice of one candidate for each head: up to a target error, or under a mean density.

Errors are (heads, candidates), costs and densities (candidates,), all float64. A cost is a share of
dense attention and counts the residual; a density is the share of pairs that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

Step = tuple[float, int, tuple[int, int]]
"""Slope, head, and the candidates before and after."""

ROUNDING = 1e-9  # of a sum of densities


def meet_target(errors: Array, costs: Array, target: float) -> Indices:
    """(heads,): the cheapest candidate with at most `target` error.

    Of equally cheap ones the truest, then the first. A head that no candidate brings to the target
    gets its truest.
    """
    met = errors <= target
    rank = np.where(met, costs, np.inf)
    cheapest = rank == rank.min(1, keepdims=True)
    truest = np.where(cheapest, errors, np.inf).argmin(1)
    return np.where(met.any(1), truest, errors.argmin(1))


def share_density(
    errors: Array, costs: Array, densities: Array, means: Sequence[float]
) -> list[Indices]:
    """Of each mean, (heads,): the candidates that leave the least summed error under that density.

    Every head starts with its cheapest candidate; then the step along a head's convex hull of cost
    and error that takes most error away for its cost is made, again and again, while the mean over
    the heads stays within the mean. Ties go to the lower head. Where even the cheapest candidates
    are denser, they are what is returned.
    """
    truest = truest_of_each_cost(errors, costs)
    hulls = [convex_hull(costs, *each) for each in zip(errors, truest, strict=True)]
    steps = [
        (_slope(costs, errors[head], *step), head, step)
        for head, hull in enumerate(hulls)
        for step in pairwise(hull)
    ]
    steps.sort(key=_steepest_first)
    return [_climb(hulls, steps, densities, mean) for mean in means]


def _climb(
    hulls: Sequence[list[int]], steps: Sequence[Step], densities: Array, mean: float
) -> Indices:
    chosen = np.array([hull[0] for hull in hulls])
    left = mean * len(hulls) - densities[chosen].sum() + ROUNDING
    for _, head, (before, after) in steps:
        dearer = densities[after] - densities[before]
        if chosen[head] == before and dearer <= left:
            chosen[head] = after
            left -= dearer
    return chosen


def truest_of_each_cost(errors: Array, costs: Array) -> Indices:
    """(heads, distinct costs): of the candidates of each cost, ascending, the one of least error,
    the first of equal ones. For all heads at once: a hull, which is found head by head, has few
    candidates left to look at then."""
    distinct, place = np.unique(costs, return_inverse=True)
    groups = [np.flatnonzero(place == index) for index in range(len(distinct))]
    return np.stack([group[errors[:, group].argmin(1)] for group in groups], 1)


def convex_hull(costs: Array, errors: Array, by_cost: Indices) -> list[int]:
    """Of the candidates `by_cost`, of ascending costs, those on the lower left of (cost, error):
    each step takes away less error for its cost than the one before."""
    hull: list[int] = []
    least_before = np.minimum.accumulate(np.append(np.inf, errors[by_cost]))[:-1]
    for index in by_cost[errors[by_cost] < least_before].tolist():
        while len(hull) > 1 and _slope(costs, errors, hull[-1], index) >= _slope(
            costs, errors, hull[-2], hull[-1]
        ):
            hull.pop()
        hull.append(index)
    return hull


def _slope(costs: Array, errors: Array, before: int, after: int) -> float:
    """Error taken away for each unit of cost; the order of a hull has ascending costs."""
    return float((errors[before] - errors[after]) / (costs[after] - costs[before]))


def _steepest_first(step: Step) -> tuple[float, int]:
    return -step[0], step[1]
