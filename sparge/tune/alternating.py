# SPDX-License-Identifier: Apache-2.0
"""Alternation: every second sparse step goes without pooled keys (`residual`).

Errors stay from step to step, and a model follows errors that stay. Errors of a step with pooled
keys and of one without partly cancel, so alternating steps lean less on the output scale
(docs/experiments.md, Pooled keys).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from .choices import HeadChoices


@dataclass(frozen=True, eq=False)
class Alternating:
    """Choices for both kinds of steps, each worked out when it is first asked for. One of the two
    may never be asked for, or not before the GPU has work that hides the time."""

    work_out: Callable[[bool], HeadChoices]
    """Makes the choices of a kind of step; True for one without pooled keys."""

    @classmethod
    def of(cls, pooling: HeadChoices, dropping: HeadChoices) -> Alternating:
        return cls((pooling, dropping).__getitem__)

    @cached_property
    def pooling(self) -> HeadChoices:
        return self.work_out(False)

    @cached_property
    def dropping(self) -> HeadChoices:
        """Choices in which no head has pooled keys."""
        return self.work_out(True)

    def in_turn(self, before: int) -> HeadChoices:
        """Choices after `before` sparse steps that ran: nodes that cache results skip some."""
        return self.dropping if before % 2 else self.pooling

    def worked_out(self) -> Alternating:
        """Copy that holds both choices and not what they are worked out from."""
        return Alternating.of(self.pooling, self.dropping)

    def each(self, change: Callable[[HeadChoices], HeadChoices]) -> Alternating:
        return Alternating(lambda dropping: change(self.dropping if dropping else self.pooling))
