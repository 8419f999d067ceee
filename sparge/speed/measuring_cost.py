# SPDX-License-Identifier: Apache-2.0
"""Cost of a measurement of heads, and how much of it a run affords.

It is worked out from what a sparse call takes (docs/experiments.md, Cost of a measurement), so that
the choices of a run are the same in every one:

    measurement = (LAUNCHES launch + ROWS token rows) of a sparse call, for each token order

on the GPU. The host takes HOST times as long as for a sparse call; where that is longer than the
dense call and the GPU, the GPU waits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from .table import Cost, Size

#: Factors of the formulas above.
LAUNCHES, ROWS, HOST = 4.0, 1.2, 10.0
#: Share of what the sparse steps save that measuring may take. Beyond it, a denser call gains more
#: for the same time (docs/experiments.md, Share of the saving that measuring takes).
SHARE = 0.05
#: Seconds that measuring may take in any case, in all layers and conditionings of one text length
#: together: nobody notices them in a run (docs/experiments.md, Measuring one order alone).
ALWAYS = 0.1
#: Share of a measurement that the query blocks of a second one add to it: keys and values are
#: prepared once.
MORE_BLOCKS = 0.5
#: Number of measurements where nothing limits them.
UNLIMITED = sys.maxsize
#: Measurements that one among the sparse steps counts for (`StepSettings`): of cond alone, as many
#: query blocks as of cond and uncond before.
AGAIN_CALLS = 2
#: Seconds in which the host chooses for one head. The GPU waits for it in a run with fewer than two
#: dense steps (docs/experiments.md, Host time of a choice).
CHOOSING = 6e-5


@dataclass(frozen=True)
class Afforded:
    """Extent of measuring that a run affords."""

    order_kinds: int
    """Token orders that each measurement covers."""
    again: int
    """Times that heads can be measured once more among the sparse steps."""
    pays: bool = True
    """False where measuring takes longer than all sparse calls can save."""


@dataclass(frozen=True)
class MeasuringCost:
    """Seconds by which measurements make dense calls longer."""

    sparse: Cost
    """Costs of sparse calls on this GPU."""
    size: Size
    dense: float
    """Seconds of a dense call, in which the GPU does not wait for the host."""
    calls: int
    """Number of usual measurements whose query blocks one of the first ones covers."""

    def seconds(self, order_kinds: int, calls: int | None = None) -> float:
        """Seconds of a measurement. calls: as above, where it is another."""
        calls = self.calls if calls is None else calls
        one = LAUNCHES * self.sparse.launch + ROWS * self.sparse.token * self.size.rows
        alone = order_kinds * one * (1 + MORE_BLOCKS * (calls - 1))
        return max(alone, HOST * self.sparse.host - self.dense)

    def affordable(
        self, most: int, *, saved: float, measurements: int, conditionings: int
    ) -> Afforded:
        """Extent of measuring that a run affords.

        Token orders come first: as many of `most` as keep a measurement within SHARE of `saved`, or
        else all measurements of the run within ALWAYS; but at least one, which may take more than
        either. Then come as many measurements among the sparse steps as are within the same
        together with the first ones.

        Token orders are what to save on. A measurement's cost grows with them as with nothing else;
        fewer query blocks predict worse, and an order that is not measured is one that no head
        takes, no more.

        saved: seconds that the calls of one layer and conditioning save in all sparse steps.
        measurements: number of the first ones of the run, in all layers and conditionings.
        """
        allowed = max(SHARE * saved, ALWAYS / measurements)
        within = (kinds for kinds in range(most, 1, -1) if self.seconds(kinds) <= allowed)
        order_kinds = next(within, 1)
        more = self.seconds(order_kinds, AGAIN_CALLS) / conditionings
        left = max(0.0, allowed - self.seconds(order_kinds))
        return Afforded(order_kinds, int(min(left / more, UNLIMITED)) if more else UNLIMITED)

    def pays(self, *, heads: int, measurements: int, saved: float) -> bool:
        """Whether the least that a run can measure, and its choice from it, take no longer than its
        sparse steps save.

        heads: of all layers. saved, measurements: as in `affordable`.
        """
        return measurements * self.seconds(1) + heads * CHOOSING <= measurements * saved
