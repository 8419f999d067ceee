# SPDX-License-Identifier: Apache-2.0
"""The choice of one candidate for each head: up to a mean error, or under a mean density.

Errors are (heads, candidates), costs and densities (candidates,), all float64. A cost is a share of
dense attention and counts the residual; a density is the share of pairs that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

ROUNDING = 1e-9  # of a sum of densities, or relative to one of errors


def meet_error(
    errors: Array, costs: Array, densities: Array, whole_errors: Array, most: float
) -> Indices:
    """(heads,): as `HullSteps.climb` to the least mean at which `whole_errors`, (heads, candidates)
    and rounding included, sum to at most `most`; the truest candidates where they never do. The
    head that moved last goes no farther than it has to."""
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
    """The steps from candidate to candidate along each head's convex hull of cost and error, the
    one that takes most error away for its cost first; arrays (steps,)."""

    cheapest: Indices
    """(heads,): where each hull begins."""
    head: Indices
    before: Indices
    after: Indices
    dearer: Array
    """What each adds to the summed density."""
    climbed: Array
    """What the steps of its head up to each add."""
    densities: Array
    """(candidates,)."""

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
        climbed = densities[after] - densities[cheapest[head]]
        dearer = densities[after] - densities[before]
        return cls(cheapest, head, before, after, dearer, climbed, densities)

    def climb(self, mean: float) -> Indices:
        """(heads,): the candidates that leave the least summed error under a mean density.

        Every head starts with its cheapest candidate; then the step along a head's hull that takes
        most error away for its cost is made, again and again, while the mean over the heads stays
        within the mean. Ties go to the lower head. Where even the cheapest candidates are denser,
        they are what is returned.
        """
        chosen = self.cheapest.copy()
        left = mean * len(chosen) - self.densities[chosen].sum() + ROUNDING
        # All steps up to the first that is too dear; a head's own are in the order of its hull.
        taken = int(np.argmax(np.append(np.cumsum(self.dearer) > left, True)))
        chosen[self.head[:taken]] = self.after[:taken]
        left -= self.dearer[:taken].sum()
        # Of the others, one by one, only those that may yet fit with the same head's before them,
        # and with all that take away density, as the residual instead of some blocks does.
        most = left - np.minimum(self.dearer[taken:], 0).sum()
        spent = np.bincount(self.head[:taken], self.dearer[:taken], len(chosen))
        needed = self.climbed[taken:] - spent[self.head[taken:]]
        others = taken + np.flatnonzero(needed <= most + ROUNDING)
        cheapest = np.minimum.accumulate(self.dearer[others][::-1])[::-1]  # of each and those after
        for step, least in zip(others.tolist(), cheapest.tolist(), strict=True):
            if least > left:
                break
            head, dearer = self.head[step], self.dearer[step]
            if chosen[head] == self.before[step] and dearer <= left:
                chosen[head] = self.after[step]
                left -= dearer
        return chosen

    def descend(self, errors: Array, most: float) -> tuple[Indices, int | None]:
        """(heads,): where each head is when `errors` first sum to at most `most`, and the one that
        moved last."""
        heads, chosen = np.arange(len(errors)), self.cheapest.copy()
        falls = errors[self.head, self.before] - errors[self.head, self.after]
        sums = errors[heads, chosen].sum() - np.append(0.0, np.cumsum(falls))
        enough = sums <= most * (1 + ROUNDING)
        taken = int(enough.argmax()) if enough.any() else len(falls)
        chosen[self.head[:taken]] = self.after[:taken]
        return chosen, int(self.head[taken - 1]) if taken else None


def truest_of_each_cost(errors: Array, costs: Array) -> Indices:
    """(heads, distinct costs): of the candidates of each cost, ascending, the one of least error,
    the first of equal ones."""
    distinct, place = np.unique(costs, return_inverse=True)
    groups = [np.flatnonzero(place == index) for index in range(len(distinct))]
    return np.stack([group[errors[:, group].argmin(1)] for group in groups], 1)
