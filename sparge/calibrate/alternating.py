# SPDX-License-Identifier: Apache-2.0
"""Steps in turn with the residual and without it.

What a pooled term gets wrong in one step it gets wrong in the next, and a model follows errors that
stay: of two small DiTs trained to find out, one made clips 2 dB further from dense ones than plain
drop did, with half of its error in every call. What is dropped errs otherwise. So every second
sparse step pools nothing, and its heads share the same mean density anew. Clips of three DiTs at 10
and 20 % density (the shipped one; seed 1; seed 2 of 384 channels; clips 0-2, H200, variants of
80f2d84; in dB; heads count by their norms but in the first row):

    residual in all steps, all heads alike   28.5 33.1   25.2 30.2   23.1 27.4
    all steps                                29.0 33.6   25.3 28.7   24.6 29.0
    every second step                        30.0 33.7   27.8 31.3   28.5 32.1
    one step of three                        30.0 33.3   28.2 31.5   28.9 32.6
    one step of six                          29.2 32.4   28.0 31.1   28.8 32.4
    none                                     28.4 31.4   26.9 30.4   28.2 31.8
    plain drop, for comparison               25.4 27.9   24.1 26.1   25.2 27.5

Worse or no better: the residual in the first or last steps alone, or in every second head or layer
of each step; small gains instead of none; blocks by mass instead of by error in the other steps;
another walk there; the choices of the steps between with their gains set to 0 (1 dB).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .choices import HeadChoices

KINDS = (False, True)  # whether a step drops all that it does not keep: the order of the fields


@dataclass(frozen=True, eq=False)
class Alternating:
    """What heads get in either kind of step."""

    pooling: HeadChoices
    dropping: HeadChoices

    def in_turn(self, before: int) -> HeadChoices:
        """After so many sparse steps: those that ran, for nodes that cache results skip some."""
        return self.dropping if before % 2 else self.pooling

    def each(self, change: Callable[[HeadChoices], HeadChoices]) -> Alternating:
        return Alternating(change(self.pooling), change(self.dropping))
