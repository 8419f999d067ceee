# SPDX-License-Identifier: Apache-2.0
"""Steps in turn with the residual for heads that are best with it, and without.

Errors stay from step to step, and a model follows errors that stay: those of a small DiT's velocity
have a cosine of .6 to .8 from one sparse step to the next, be it with pooled terms or without. From
a step of one kind to one of the other it is -.3 to .4. Most of that is put right in all steps
(`contrast.py`), and then both kinds do about as well alone as in turn. In turn they lean less on
the contrast: where it is off, or is that of another clip as in a profile, their errors still cancel
in part. Clips of five DiTs at 10 and 20 % density (the shipped one; seed 1; seed 2 of 384 channels;
seed 3 of 512, trained for 130 s; the same hardly trained, 1,144 steps; clips 0-2, H200, variants of
9d473ee; in dB):

    the residual in every second step     30.4 36.0  30.3 33.4  30.4 34.3  30.5 33.7  33.0 36.8
    in all steps                          30.2 35.3  30.3 33.9  30.0 33.9  30.3 34.2  33.1 36.9
    in no step                            29.8 34.9  30.0 32.6  30.4 33.9  30.4 32.7  32.8 36.5
    in every second, the others plainly   30.7 35.7  30.2 33.7  30.9 34.4  30.2 32.8  33.0 36.6
    plain drop, upstream's                25.4 27.9  24.1 26.1  25.2 27.5  25.5 28.3  29.6 35.3

and without any contrast:

    the residual in every second step     28.4 32.5  27.7 31.1  25.9 29.6  28.7 32.7  25.2 30.3
    in all steps                          28.9 33.5  27.9 31.1  25.8 29.4  28.6 32.6  24.7 30.4
    in every second, the others plainly   30.5 34.0  29.2 32.4  29.0 32.5  28.9 32.9  32.1 37.9

With half of the contrast (its root) at 20 % the shipped model, seed 2, seed 3 and the last one come
to 33.1 28.6 33.7 34.4 dB in turn, and to 34.3 25.3 33.6 30.3 with the residual in all steps.

Worse or no better before there was a contrast (with the residual alone): it in the first or last
steps alone, or in every second head or layer of each step; small gains instead of none; blocks by
mass instead of by error in the other steps; another walk there; the choices of the steps between
with their gains set to 0 (1 dB).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from .choices import HeadChoices


@dataclass(frozen=True, eq=False)
class Alternating:
    """What heads get in either kind of step, each worked out when it is first asked for: one of the
    two may never be, or not before the GPU has work that hides it."""

    work_out: Callable[[bool], HeadChoices]
    """By whether a step is one without the residual."""

    @classmethod
    def of(cls, pooling: HeadChoices, dropping: HeadChoices) -> Alternating:
        return cls((pooling, dropping).__getitem__)

    @cached_property
    def pooling(self) -> HeadChoices:
        return self.work_out(False)

    @cached_property
    def dropping(self) -> HeadChoices:
        """No head has the residual."""
        return self.work_out(True)

    def in_turn(self, before: int) -> HeadChoices:
        """After so many sparse steps: those that ran, for nodes that cache results skip some."""
        return self.dropping if before % 2 else self.pooling

    def worked_out(self) -> Alternating:
        """The same without what it is worked out from."""
        return Alternating.of(self.pooling, self.dropping)

    def each(self, change: Callable[[HeadChoices], HeadChoices]) -> Alternating:
        return Alternating(lambda dropping: change(self.dropping if dropping else self.pooling))
