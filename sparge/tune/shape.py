# SPDX-License-Identifier: Apache-2.0
"""One shape of attention calls, whose heads are measured and chosen together."""

from __future__ import annotations

from dataclasses import dataclass

from ..order.grid import TokenGrid, TokenOrder, grid_order
from ..order.variants import VARIANTS
from .profile_header import Table
from .workload import Workload

#: Conditioning under which profiles hold what all of them share.
SHARED = "shared"


@dataclass(frozen=True)
class Shape:
    """Shape that one set of settings is for: conditionings of one shape share theirs."""

    tokens: int
    heads: int
    grid: TokenGrid | None
    """Token grid; None where the tokens stay in the order they come."""
    rows: int = 0
    """Number of rows of the pass. Conditionings with more VACE controls make more calls."""

    def workload(self) -> Workload:
        """Workload in the first variant, which stands for all of them."""
        if self.grid is None:
            return Workload.of_tokens(self.tokens)
        return Workload(grid_order(self.grid))

    def orders(self) -> list[TokenOrder]:
        """Token orders that steps take in turn; none where the tokens stay in the order they
        come.
        """
        if self.grid is None:
            return []
        return [grid_order(self.grid, variant) for variant in range(VARIANTS)]

    def forget_copies(self) -> None:
        for order in (*self.orders(), self.workload().order):
            order.forget_copies()


def table_of(shape: Shape) -> Table:
    """Table of a profile that holds the settings of a shape."""
    return Table(SHARED, shape.tokens, shape.grid)
