# SPDX-License-Identifier: Apache-2.0
"""What stands best for dropped blocks among all that costs the same: budgets choose between costs.

Plain dropping and all backgrounds cost nothing, all gains of the residual the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .candidates import Kind

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


def best_kinds(errors: Array, kinds: Sequence[Kind]) -> tuple[Array, Indices]:
    """(..., kinds) to (..., costs), twice: the least error of the kinds that pool nothing, then of
    those that pool, where there are such; and the places of those kinds.

    The earlier of equal kinds is taken, so plain dropping wins a tie. Where no error is finite the
    first kind is taken, with an infinite one.
    """
    pools = np.array([kind.gain > 0 for kind in kinds])
    of_costs = [places for places in (np.flatnonzero(~pools), np.flatnonzero(pools)) if places.size]
    shape = (*errors.shape[:-1], len(of_costs))
    least, best = np.full(shape, np.inf), np.empty(shape, np.int64)
    for cost, places in enumerate(of_costs):
        best[..., cost] = places[0]
        # One by one takes a third of argmin's time over so short an axis.
        for place in places:
            better = errors[..., place] < least[..., cost]  # never so of NaN
            np.copyto(least[..., cost], errors[..., place], where=better)
            np.copyto(best[..., cost], place, where=better)
    return least, best
