# SPDX-License-Identifier: Apache-2.0
"""Window of a run: the noise levels in which attention may be sparse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .facts import PassFacts, Place

#: Relative distance within which two noise levels are the same. A step often falls exactly on the
#: edge (20 steps, start_percent 0.2), where the float32 schedule and the float64 edge differ in the
#: last bits: this is above that, below a step.
SAME_SIGMA = 1e-5


@dataclass(frozen=True)
class SigmaWindow:
    """Range of noise levels in which attention may be sparse; sigma falls while sampling."""

    start: float
    end: float
    start_percent: float = 0.0
    """Edge as a user gives it; below likewise."""
    end_percent: float = 1.0

    @property
    def is_everything(self) -> bool:
        return self.start == math.inf and self.end == 0.0

    @classmethod
    def of(
        cls, start_percent: float, end_percent: float, to_sigma: Callable[[float], float]
    ) -> SigmaWindow:
        """Turns percent into sigma.

        The edges 0 and 1 are open: model samplings disagree about the sigma they give them.
        """
        start = float(to_sigma(start_percent)) if start_percent > 0 else math.inf
        end = float(to_sigma(end_percent)) if end_percent < 1 else 0.0
        return cls(start, end, start_percent, end_percent)

    def facts(self, facts: PassFacts, sigma: float, schedule: Sequence[float]) -> PassFacts:
        """Facts of a pass at a noise level, with what follows from that."""
        return replace(
            facts,
            why_dense=self.outside_reason(sigma),
            is_last_dense=self.is_last_dense(sigma, schedule),
            place=self.place(sigma, schedule),
        )

    def outside_reason(self, sigma: float) -> str | None:
        if self.start_percent > self.end_percent:
            return (
                f"start_percent {self.start_percent:g} is above end_percent "
                f"{self.end_percent:g}, so no step is between them"
            )
        if self._is_before(sigma):
            return f"before start_percent {self.start_percent:g}"
        if self._is_after(sigma):
            return f"after end_percent {self.end_percent:g}"
        return None

    def is_last_dense(self, sigma: float, schedule: Sequence[float]) -> bool:
        """Whether sigma is before the window and no step of the schedule lies between.

        It goes by noise level and not by counting passes: right wherever a sampler evaluates the
        model.
        """
        if self.start < self.end:  # no step is in the window
            return False
        below = sigma * (1 - SAME_SIGMA)
        later = any(level < below and self._is_before(level) for level in schedule)
        return self._is_before(sigma) and not later

    def place(self, sigma: float, schedule: Sequence[float]) -> Place | None:
        """Place of the step at a noise level, or of the next one in the schedule; None where no
        step of the schedule is in the window."""
        inside = [x for x in schedule if not self._is_before(x) and not self._is_after(x)]
        if not inside:
            return None
        above = sum(level > sigma * (1 + SAME_SIGMA) for level in inside)
        return Place(min(above, len(inside) - 1), len(inside))

    def dense_steps(self, schedule: Sequence[float]) -> int:
        """Number of steps that are dense, at least: those outside the window, and where none comes
        before it, the one that is measured."""
        before, after = (sum(map(is_out, schedule)) for is_out in (self._is_before, self._is_after))
        return max(1, before) + after

    def sparse_steps(self, schedule: Sequence[float]) -> int | None:
        """Number of the other steps, where the schedule is known."""
        return max(0, len(schedule) - self.dense_steps(schedule)) if schedule else None

    def _is_before(self, sigma: float) -> bool:
        return sigma > self.start * (1 + SAME_SIGMA)

    def _is_after(self, sigma: float) -> bool:
        return sigma < self.end * (1 - SAME_SIGMA)
