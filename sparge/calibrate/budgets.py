# SPDX-License-Identifier: Apache-2.0
"""The choice of one candidate for each head: up to a target error, or under a mean density.

Errors are (heads, candidates), costs and densities (candidates,), all float64. A cost is a share of
dense attention and counts the residual; a density is the share of pairs that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

ROUNDING = 1e-9  # of a sum of densities


def left_for_dropping(target: float, rounding: Array) -> Array:
    """The error that dropping may add to that of rounding; half of the target where rounding alone
    leaves less or misses it: keeping everything would gain little there, and cost all."""
    return np.sqrt(np.maximum(target**2 - rounding**2, (target / 2) ** 2))


def meet_target(errors: Array, costs: Array, target: Array | float) -> Indices:
    """(heads,): the cheapest candidate with at most `target` error, one or (heads, 1).

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
    steps = HullSteps.of(errors, costs, densities)
    return [steps.climb(densities, mean) for mean in means]


@dataclass(frozen=True, eq=False)
class HullSteps:
    """The steps from candidate to candidate along each head's convex hull of cost and error, the
    one that takes most error away for its cost first; arrays (steps,)."""

    cheapest: Indices
    """(heads,): where each hull begins."""
    head: Indices
    before: Indices
    after: Indices
    dearer: Array
    """What each adds to the summed density."""

    @classmethod
    def of(cls, errors: Array, costs: Array, densities: Array) -> HullSteps:
        """Every hull is walked from its cheapest candidate to the steepest fall, of equal ones the
        farthest, until nothing falls. An error may be infinite, never the least."""
        truest = truest_of_each_cost(errors, costs)
        error, cost = np.take_along_axis(errors, truest, 1), costs[truest[0]]
        dearest_first = error[:, ::-1].copy()  # argmax takes the first of equal ones
        heads, last = np.arange(len(error)), error.shape[1] - 1
        at = np.isfinite(error).argmax(1)
        cheapest, bound = truest[heads, at], np.full(len(error), np.inf)
        slopes, ends = np.zeros_like(error), np.zeros_like(truest)  # of the step from each cost
        for start in range(last):
            here = np.flatnonzero(at == start)
            falls = error[here, start, None] - dearest_first[here, : last - start]
            slope = falls / (cost[:start:-1] - cost[start])
            best = slope.argmax(1)
            steepest = slope[heads[: len(here)], best]
            going = steepest > 0
            here, steepest, end = here[going], steepest[going], last - best[going]
            # Rounding shall not put a head's steps out of their order.
            bound[here] = np.minimum(bound[here], steepest)
            slopes[here, start], ends[here, start], at[here] = bound[here], end, end
        head, start = slopes.nonzero()
        order = np.argsort(-slopes[head, start], kind="stable")
        head, start = head[order], start[order]
        before, after = truest[head, start], truest[head, ends[head, start]]
        return cls(cheapest, head, before, after, densities[after] - densities[before])

    def climb(self, densities: Array, mean: float) -> Indices:
        """(heads,): the candidate at which each head has arrived."""
        chosen = self.cheapest.copy()
        left = mean * len(chosen) - densities[chosen].sum() + ROUNDING
        # All steps up to the first that is too dear; a head's own are in the order of its hull.
        taken = int(np.argmax(np.append(np.cumsum(self.dearer) > left, True)))
        chosen[self.head[:taken]] = self.after[:taken]
        left -= self.dearer[:taken].sum()
        # Of the others only those that may yet fit, one by one.
        others = taken + np.flatnonzero(self.dearer[taken:] <= left)
        steps = (
            each[others].tolist() for each in (self.head, self.before, self.after, self.dearer)
        )
        places = chosen.tolist()
        for head, before, after, dearer in zip(*steps, strict=True):
            if places[head] == before and dearer <= left:
                places[head] = after
                left -= dearer
        return np.array(places)


def truest_of_each_cost(errors: Array, costs: Array) -> Indices:
    """(heads, distinct costs): of the candidates of each cost, ascending, the one of least error,
    the first of equal ones."""
    distinct, place = np.unique(costs, return_inverse=True)
    groups = [np.flatnonzero(place == index) for index in range(len(distinct))]
    return np.stack([group[errors[:, group].argmin(1)] for group in groups], 1)
