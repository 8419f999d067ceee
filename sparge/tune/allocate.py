# SPDX-License-Identifier: Apache-2.0
"""Choice of one candidate for each head: up to a mean error, or under a mean density.

Errors are (heads, candidates), costs and densities (candidates,), all float64. A cost is a share of
dense attention and includes the pooled keys. A density is the share of pairs that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

ROUNDING = 1e-9  # share of a sum of densities, or of a sum of errors


def meet_error(
    errors: Array, costs: Array, densities: Array, whole_errors: Array, most: float
) -> Indices:
    """(heads,) candidates at the least mean density whose `whole_errors` sum to at most `most`.

    whole_errors: (heads, candidates), rounding included. Candidates are those of `HullSteps.climb`,
    or the ones of least error where no mean density suffices. The head that moved last goes no
    farther than it has to, which counts in models of few heads.
    """
    steps = HullSteps.of(errors, costs, densities)
    chosen, last = steps.descend(whole_errors, most)
    if last is not None:
        reached = whole_errors[np.arange(len(chosen)), chosen]
        left = most * (1 + ROUNDING) - (reached.sum() - reached[last])
        enough = np.flatnonzero(whole_errors[last] <= left)
        if enough.size:
            chosen[last] = min(enough, key=lambda each: (costs[each], errors[last, each]))
    return chosen


@dataclass(frozen=True, eq=False)
class HullSteps:
    """Steps from candidate to candidate along each head's convex hull of error over cost; arrays
    (steps,).

    The step that takes most error away for its cost comes first.
    """

    cheapest: Indices
    """(heads,): candidate where each hull begins."""
    head: Indices
    before: Indices
    after: Indices
    dearer: Array
    """(steps,): density that each step adds to the sum."""
    densities: Array
    """(candidates,) densities."""

    @classmethod
    def of(cls, errors: Array, costs: Array, densities: Array) -> HullSteps:
        """Follows each hull from its cheapest candidate to the steepest fall until nothing falls.

        Of equal falls the farthest is taken. An error may be infinite; the least one of a head
        never is.
        """
        truest = truest_of_each_cost(errors, costs)
        error, cost = np.take_along_axis(errors, truest, 1), costs[truest[0]]
        dearest_first = error[:, ::-1].copy()  # argmax takes the first of equal ones
        heads, last = np.arange(len(error)), error.shape[1] - 1
        at = np.isfinite(error).argmax(1)
        cheapest, bound = truest[heads, at], np.full(len(error), np.inf)
        slopes, ends = np.zeros_like(error), np.zeros_like(truest)  # of each step
        for start in range(last):
            here = np.flatnonzero(at == start)
            falls = error[here, start, None] - dearest_first[here, : last - start]
            slope = falls / (cost[:start:-1] - cost[start])
            best = slope.argmax(1)
            steepest = slope[heads[: len(here)], best]
            going = steepest > 0
            here, steepest, end = here[going], steepest[going], last - best[going]
            # Rounding must not put a head's steps out of their order.
            bound[here] = np.minimum(bound[here], steepest)
            slopes[here, start], ends[here, start], at[here] = bound[here], end, end
        head, start = slopes.nonzero()
        order = np.argsort(-slopes[head, start], kind="stable")
        head, start = head[order], start[order]
        before, after = truest[head, start], truest[head, ends[head, start]]
        dearer = densities[after] - densities[before]
        return cls(cheapest, head, before, after, dearer, densities)

    def climb(self, mean: float) -> Indices:
        """(heads,) candidates that leave the least summed error under a mean density.

        Every head starts with its cheapest candidate. Then the step along a head's hull that takes
        most error away for its cost is made, again and again, wherever the mean over the heads
        stays within `mean`. Ties go to the lower head. Where even the cheapest candidates are
        denser, those are returned.
        """
        chosen = self.cheapest.tolist()
        left = mean * len(chosen) - self.densities[chosen].sum() + ROUNDING
        steps = (x.tolist() for x in (self.head, self.before, self.after, self.dearer))
        for head, before, after, dearer in zip(*steps, strict=True):
            if chosen[head] == before and dearer <= left:
                chosen[head], left = after, left - dearer
        return np.array(chosen)

    def descend(self, errors: Array, most: float) -> tuple[Indices, int | None]:
        """(heads,) candidates when `errors` first sum to at most `most`, and the head that moved
        last."""
        heads, chosen = np.arange(len(errors)), self.cheapest.copy()
        falls = errors[self.head, self.before] - errors[self.head, self.after]
        sums = errors[heads, chosen].sum() - np.append(0.0, np.cumsum(falls))
        enough = sums <= most * (1 + ROUNDING)
        taken = int(enough.argmax()) if enough.any() else len(falls)
        chosen[self.head[:taken]] = self.after[:taken]
        return chosen, int(self.head[taken - 1]) if taken else None


def truest_of_each_cost(errors: Array, costs: Array) -> Indices:
    """(heads, distinct costs) candidates of least error for each cost, ascending; the first of
    equal ones."""
    distinct, place = np.unique(costs, return_inverse=True)
    groups = [np.flatnonzero(place == index) for index in range(len(distinct))]
    return np.stack([group[errors[:, group].argmin(1)] for group in groups], 1)
