# SPDX-License-Identifier: Apache-2.0
"""Steps in turn with something that stands for what heads drop, and without.

Errors stay from step to step, and a model follows errors that stay: those of a small DiT's velocity
have a cosine of .6 to .8 from one sparse step to the next, be it with pooled terms or without. But
errors of both kinds differ: means draw an output towards the mean (errors of such heads have a
cosine of -.1 to -.7 with the exact output), what is dropped leaves its weight to the rest (most
have one of 0 to .25). From a step of one kind to one of the other the cosine is .1 to .4. So every
second sparse step drops plainly, and its heads share the same mean density anew; in the others a
head takes what errs least, the residual, the background or nothing. Clips of four DiTs at 10 and
20 % density (the shipped one; seed 1; seed 2 of 384 channels; seed 3 of 512, trained for 130 s;
clips 0-2, H200, variants of 4206e74; in dB):

    in every second step (here)              30.5 34.0   29.2 32.4   29.0 32.5   28.9 32.9
    in one step of three                     30.3 33.6   29.1 32.4   29.3 32.9   28.4 32.4
    in two steps of three                    30.1 34.2   29.3 32.3   28.6 31.6   28.8 32.7
    in all steps                             28.9 33.5   27.9 31.1   25.8 29.4   28.6 32.6
    and in the others the background         28.4 32.5   27.7 31.1   25.9 29.6   28.7 32.7
    the background alone in every second     29.9 32.5   29.1 32.4   29.1 32.4   29.2 32.7
    the residual alone in every second       30.4 33.9   28.2 31.6   28.4 32.0   27.1 31.9
    the residual alone in all steps          28.7 33.5   25.5 29.0   23.9 28.4   24.9 30.2
    nothing in any step                      28.9 31.8   27.3 30.9   28.4 32.1   27.7 31.4
    plain drop, for comparison               25.4 27.9   24.1 26.1   25.2 27.5   25.5 28.3

The mean error of heads says nothing of that: the background in the other steps, too, makes it
smaller there by a quarter (.214 to .157, shipped one, 10 %), and clips 2 dB worse.

Worse or no better (with the residual alone): it in the first or last steps alone, or in every
second head or layer of each step; small gains instead of none; blocks by mass instead of by error
in the other steps; another walk there; the choices of the steps between with their gains set to 0
(1 dB). And outputs of each head times the factor that leaves the least error (up to 2.6 dB worse).
With that factor and a multiple of the mean value, both fitted to the exact output in every call,
clips would be at 30.6 34.7, 29.1 31.7, 30.3 33.6 and 30.0 33.5 dB (residual in every second step).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .choices import HeadChoices

KINDS = (False, True)  # whether a step is one without the residual: the order of the fields


@dataclass(frozen=True, eq=False)
class Alternating:
    """What heads get in either kind of step; in dropping ones no residual."""

    pooling: HeadChoices
    dropping: HeadChoices

    def in_turn(self, before: int) -> HeadChoices:
        """After so many sparse steps: those that ran, for nodes that cache results skip some."""
        return self.dropping if before % 2 else self.pooling

    def each(self, change: Callable[[HeadChoices], HeadChoices]) -> Alternating:
        return Alternating(change(self.pooling), change(self.dropping))
