# SPDX-License-Identifier: Apache-2.0
"""One shape of attention calls, whose heads are measured and chosen together."""

from __future__ import annotations

from dataclasses import dataclass

from ..order.grid import TokenGrid, TokenOrder, grid_order, raster_order
from ..order.places import order_as_dealt
from ..order.variants import VARIANTS
from .workload import Workload


@dataclass(frozen=True)
class Shape:
    """Shape that one set of settings is for: conditionings of one shape share theirs."""

    tokens: int
    heads: int
    grid: TokenGrid | None
    """Token grid; None where the tokens stay in the order they come."""
    ranks: int = 1
    """Number of processes that share the tokens outside of attention, which sees them as dealt."""

    def workload(self) -> Workload:
        """Workload in the first variant, which stands for all of them."""
        if self.grid is None:
            return Workload(raster_order(self.tokens))
        return Workload(order_as_dealt(grid_order(self.grid), self.grid, self.ranks))

    def orders(self) -> list[TokenOrder]:
        """Token orders that steps take in turn; none where the tokens stay in the order they
        come.
        """
        grid = self.grid
        if grid is None:
            return []
        orders = (grid_order(grid, variant) for variant in range(VARIANTS))
        return [order_as_dealt(order, grid, self.ranks) for order in orders]

    def forget_copies(self) -> None:
        for order in (*self.orders(), self.workload().order):
            order.forget_copies()
