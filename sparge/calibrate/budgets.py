# SPDX-License-Identifier: Apache-2.0
"""The choice of one candidate for each head: up to a target error, or under a mean density.

Errors are (heads, candidates), costs and densities (candidates,), all float64. A cost is a share of
dense attention and counts the residual; a density is the share of pairs that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

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
    steps = _Steps.of(errors, costs, densities, hulls)
    cheapest = np.array([hull[0] for hull in hulls])
    return [steps.climb(cheapest, densities[cheapest].sum(), mean) for mean in means]


@dataclass(frozen=True, eq=False)
class _Steps:
    """The steps along the hulls of all heads, steepest first; arrays (steps,)."""

    head: Indices
    before: Indices
    after: Indices
    dearer: Array
    """What each adds to the summed density."""

    @classmethod
    def of(
        cls, errors: Array, costs: Array, densities: Array, hulls: Sequence[list[int]]
    ) -> _Steps:
        head = np.repeat(np.arange(len(hulls)), [len(hull) - 1 for hull in hulls])
        steps = np.array([step for hull in hulls for step in pairwise(hull)], np.int64)
        before, after = steps.reshape(-1, 2).T
        slope = (errors[head, before] - errors[head, after]) / (costs[after] - costs[before])
        order = np.argsort(-slope, kind="stable")
        before, after = before[order], after[order]
        return cls(head[order], before, after, densities[after] - densities[before])

    def climb(self, cheapest: Indices, spent: float, mean: float) -> Indices:
        """(heads,): the candidate at which each head has arrived."""
        chosen = cheapest.copy()
        left = mean * len(chosen) - spent + ROUNDING
        # All steps up to the first that is too dear; a head's own are in the order of its hull.
        taken = int(np.argmax(np.append(np.cumsum(self.dearer) > left, True)))
        chosen[self.head[:taken]] = self.after[:taken]
        left -= self.dearer[:taken].sum()
        # Of the others only those that may yet fit, one by one.
        for step in taken + np.flatnonzero(self.dearer[taken:] <= left):
            head = self.head[step]
            if chosen[head] == self.before[step] and self.dearer[step] <= left:
                chosen[head] = self.after[step]
                left -= self.dearer[step]
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
