# SPDX-License-Identifier: Apache-2.0
"""Counters that kernels add to; nothing waits for the GPU until somebody reads them."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Counter(IntEnum):
    """Indices of the counters: of query-key pairs, and of pairs of a query and a key block."""

    KEPT = 0
    VALID = 1
    PV_SKIPPED = 2
    KEPT_BLOCKS = 3


class AttentionStats:
    """Counts of what was kept and skipped, over all calls that were given this object.

    ``counters`` is an int64 tensor on ``device``, a number for each `Counter`. Make it once,
    outside the attention calls; reading a property synchronises with the device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.counters: Tensor = torch.zeros(len(Counter), dtype=torch.int64, device=device)
        self._calls = 0
        self._calls_in_graphs: Tensor = torch.zeros((), dtype=torch.int64, device=device)

    def reset(self) -> None:
        self.counters.zero_()
        self._calls = 0
        self._calls_in_graphs.zero_()

    def add_call(self) -> None:
        """Counts one call. In a graph of torch.compile the tensor counts: a number of Python would
        be a constant of the graph, which is traced anew for the next one."""
        if torch.compiler.is_compiling():
            self._calls_in_graphs += 1
        else:
            self._calls += 1

    @property
    def calls(self) -> int:
        """Number of calls that raised nothing."""
        return self._calls + int(self._calls_in_graphs)

    @property
    def density(self) -> float:
        """Kept pairs over valid pairs, forced blocks included; 1.0 before any call.

        Under a causal mask ``topk`` = t gives 2 t - t^2, 0.75 at 0.5, and more for what is forced:
        it is a share of all key blocks, and early queries see fewer than that.
        """
        counts = self.counters.tolist()
        valid = counts[Counter.VALID]
        return counts[Counter.KEPT] / valid if valid else 1.0

    @property
    def blocks_kept(self) -> int:
        """Key blocks that query blocks attended to, over all heads and batch entries. Blocks behind
        a key length or the diagonal are not among them."""
        return int(self.counters[Counter.KEPT_BLOCKS])

    @property
    def pv_skipped_share(self) -> float:
        """Share of the kept pairs whose exp and PV the filter skipped."""
        counts = self.counters.tolist()
        kept = counts[Counter.KEPT]
        return counts[Counter.PV_SKIPPED] / kept if kept else 0.0
