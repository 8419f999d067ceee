# SPDX-License-Identifier: Apache-2.0
"""Choice of one candidate for each head: up to a mean error, or under a mean density.

Errors are (heads, candidates), costs and densities (candidates,), all float64. A cost is a share of
dense attention and includes the pooled keys. A density is the share of pairs that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

ROUNDING = 1e-9  # share of a sum of densities, or of a sum of errors


def meet_error(
    steps: HullSteps, errors: Array, costs: Array, whole_errors: Array, most: float
) -> Indices:
    """(heads,) candidates at the least mean density whose `whole_errors` sum to at most `most`.

    whole_errors: (heads, candidates), rounding included. Candidates are those of `HullSteps.climb`,
    or the ones of least error where no mean density suffices. The head that moved last goes no
    farther than it has to, which counts in models of few heads.
    """
    chosen, last = steps.descend(whole_errors, most)
    if last is not None:
        reached = whole_errors[np.arange(len(chosen)), chosen]
        left = most * (1 + ROUNDING) - (reached.sum() - reached[last])
        enough = np.flatnonzero(whole_errors[last] <= left)
        if enough.size:
            chosen[last] = min(enough, key=lambda each: (costs[each], errors[last, each]))
    return chosen


@dataclass(frozen=True, eq=False)
class Hulls:
    """Convex hulls of the errors of some heads over cost; arrays (steps,), head by head."""

    cheapest: Indices
    """(heads,): candidate where each hull begins."""
    head: Indices
    before: Indices
    after: Indices
    fall: Array
    """(steps,): error that a step takes away for its cost; falls along each hull."""

    @classmethod
    def of(cls, errors: Array, costs: Array) -> Hulls:
        """Follows each hull from its cheapest candidate to the steepest fall until nothing falls.

        Of equal falls the farthest is taken. An error may be infinite; the least one of a head
        never is.
        """
        truest = _truest_of_each_cost(errors, costs)
        error, cost = np.take_along_axis(errors, truest, 1), np.unique(costs)
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
        before, after = truest[head, start], truest[head, ends[head, start]]
        return cls(cheapest, head, before, after, slopes[head, start])

    @classmethod
    def joined(cls, parts: Sequence[Hulls]) -> Hulls:
        """Hulls of the heads of all parts, one part after the other."""
        firsts = np.cumsum([0, *(len(part.cheapest) for part in parts)])
        return cls(
            np.concatenate([part.cheapest for part in parts]),
            np.concatenate([first + part.head for first, part in zip(firsts, parts, strict=False)]),
            np.concatenate([part.before for part in parts]),
            np.concatenate([part.after for part in parts]),
            np.concatenate([part.fall for part in parts]),
        )


@dataclass(frozen=True, eq=False)
class HullSteps:
    """Steps from candidate to candidate along the hulls of all heads; arrays (steps,).

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
    def of(cls, hulls: Hulls, head_weight: Array, densities: Array) -> HullSteps:
        """Puts the steps of all hulls in order. head_weight: (heads,), what a head's error
        counts."""
        order = np.argsort(-hulls.fall * head_weight[hulls.head], kind="stable")
        before, after = hulls.before[order], hulls.after[order]
        dearer = densities[after] - densities[before]
        return cls(hulls.cheapest, hulls.head[order], before, after, dearer, densities)

    def climb(self, mean: float) -> Indices:
        """(heads,) candidates that leave the least summed error under a mean density.

        Every head starts with its cheapest candidate. Then the step along a head's hull that takes
        most error away for its cost is made, again and again, wherever the mean over the heads
        stays within `mean`. Ties go to the lower head. Where even the cheapest candidates are
        denser, those are returned.
        """
        chosen = self.cheapest.copy()
        left = mean * len(chosen) - self.densities[chosen].sum() + ROUNDING
        over = np.cumsum(self.dearer) > left
        fit = int(over.argmax()) if over.any() else len(over)  # steps that all fit, one by one
        chosen[self.head[:fit]] = self.after[:fit]
        left -= self.dearer[:fit].sum()
        most = left - np.minimum(self.dearer[fit:], 0).sum()  # what others may make room for
        later = fit + np.flatnonzero(self.dearer[fit:] <= most)
        steps = (x[later].tolist() for x in (self.head, self.before, self.after, self.dearer))
        for head, before, after, dearer in zip(*steps, strict=True):
            if dearer <= left and chosen[head] == before:
                chosen[head], left = after, left - dearer
        return chosen

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


def _truest_of_each_cost(errors: Array, costs: Array) -> Indices:
    """(heads, distinct costs) candidates of least error for each cost, ascending; the first of
    equal ones."""
    by_cost = np.argsort(costs, kind="stable")
    _, starts = np.unique(costs[by_cost], return_index=True)
    groups, by_candidate = np.split(by_cost, starts[1:]), np.ascontiguousarray(errors.T)
    return np.stack([group[by_candidate[group].argmin(0)] for group in groups], 1)
