# SPDX-License-Identifier: Apache-2.0
"""Heads that all follow one policy: nothing is measured, steps take token orders in turn."""

from __future__ import annotations

import torch
from torch import Tensor

from ..order.grid import TokenGrid, TokenOrder, unmeasured_order
from ..order.variants import VARIANTS
from ..policy import SparsePolicy
from ..speed.worth import density_with_exact
from .call import Call
from .facts import Layout
from .head_table import Untracked
from .worth import slower_reason


class AlikeHeads:
    """Token orders of one run on its devices, by grid and variant."""

    def __init__(self, untracked: Untracked, even_if_slower: bool) -> None:
        """untracked, even_if_slower: as in `Session`."""
        self._untracked, self._even_if_slower = untracked, even_if_slower
        self._orders: dict[tuple[TokenGrid, int, torch.device], TokenOrder] = {}

    def begin(self, layout: Layout, step: int, device: torch.device) -> None:
        """Makes the orders that a pass expects before its calls."""
        for grid in layout.expected:
            self._order(grid, step % VARIANTS, device)

    def order(self, grid: TokenGrid | None, step: int, device: torch.device) -> TokenOrder | None:
        """Order that a step takes. One that was not expected is made inside a call."""
        if grid is None:
            return None
        key = grid, step % VARIANTS, device
        if key not in self._orders:
            with self._untracked():
                self._order(*key)
        return self._orders[key]

    def _order(self, grid: TokenGrid, variant: int, device: torch.device) -> None:
        self._orders[grid, variant, device] = unmeasured_order(grid, variant).on(device)

    def slower(self, call: Call, policy: SparsePolicy) -> str | None:
        """Reason why a call would be slower sparse, or None. What cdf keeps is not known, nor what
        heads do that have a share each."""
        topk = policy.topk
        if policy.select_by != "topk" or self._even_if_slower or isinstance(topk, Tensor):
            return None
        text = (policy.exact_prefix + policy.exact_suffix) / call.query_tokens
        density = density_with_exact(topk, text)
        return slower_reason(call, density, policy.pv_filter, pooled=None)

    def end(self) -> None:
        """Gives back what outlives the run on the devices."""
        for grid, variant, _ in self._orders:
            unmeasured_order(grid, variant).forget_copies()
        self._orders.clear()
