# SPDX-License-Identifier: Apache-2.0
"""Result of a run when it is over: nothing of the model."""

from __future__ import annotations

from dataclasses import dataclass

from ..tune import Report, Tally
from .words import PLAIN, HostWords


@dataclass(frozen=True, eq=False)
class RunResult:
    """Facts of one run, as the report and the end-of-run line tell it."""

    tally: Tally
    report: Report
    """Densities and measured heads, as the session tells them."""
    stopped: bool = False
    notes: tuple[str, ...] = ()
    steps: int = 0
    """Number of steps of the schedule; 0 where that is not known."""
    seconds: float = 0.0
    """Seconds of the run from its first pass on; 0 where none came."""
    words: HostWords = PLAIN

    @property
    def stopped_early(self) -> bool:
        """Whether an error or the user stopped it before a pass that may be sparse was over."""
        return self.stopped and not self.tally.sparse and not self.tally.may_have_been_sparse
