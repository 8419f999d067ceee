# SPDX-License-Identifier: Apache-2.0
"""Heads that all follow one policy: nothing is measured, steps take token orders in turn."""

from __future__ import annotations

import torch
from torch import Tensor

from ..order.grid import TokenGrid, TokenOrder, unmeasured_order
from ..order.places import order_as_dealt
from ..order.variants import VARIANTS
from ..policy import SparsePolicy
from .facts import Layout
from .records import Untracked
from .ways import Choice


class AlikeHeads:
    """Token orders of one run on its devices, by grid, number of ranks and variant."""

    def __init__(self, untracked: Untracked) -> None:
        """untracked: as in `Session`."""
        self._untracked = untracked
        self._orders: dict[tuple[TokenGrid, int, int, torch.device], TokenOrder] = {}

    def begin(self, layout: Layout, step: int, device: torch.device) -> None:
        """Makes the orders that a pass expects before its calls."""
        for grid in layout.expected:
            self._order(grid, layout.ranks, step % VARIANTS, device)

    def order(
        self, grid: TokenGrid | None, ranks: int, step: int, device: torch.device
    ) -> TokenOrder | None:
        """Order that a step takes. One that was not expected is made inside a call."""
        if grid is None:
            return None
        key = grid, ranks, step % VARIANTS, device
        if key not in self._orders:
            with self._untracked():
                self._order(*key)
        return self._orders[key]

    def _order(self, grid: TokenGrid, ranks: int, variant: int, device: torch.device) -> None:
        order = order_as_dealt(unmeasured_order(grid, variant), grid, ranks)
        self._orders[grid, ranks, variant, device] = order.on(device)

    def slower(self, choice: Choice, policy: SparsePolicy) -> str | None:
        """Reason why calls would be slower sparse, or None. What cdf keeps is not known, nor what
        heads do that have a share each."""
        topk = policy.topk
        if policy.select_by != "topk" or isinstance(topk, Tensor):
            return None
        text = (policy.exact_prefix + policy.exact_suffix) / choice.tokens
        is_slower = density_with_exact(topk, text) >= choice.break_even[False]
        return choice.why_slower(pools=False) if is_slower else None

    def end(self) -> None:
        """Gives back what outlives the run on the devices."""
        for grid, ranks, variant, _ in self._orders:
            order_as_dealt(unmeasured_order(grid, variant), grid, ranks).forget_copies()
        self._orders.clear()


def density_with_exact(topk: float, exact: float) -> float:
    """Share of pairs kept where query blocks rank in `topk` of all key blocks, and a share `exact`
    of the tokens (text) attends and is attended to densely."""
    return exact + (1 - exact) * min(1.0, exact + topk)
