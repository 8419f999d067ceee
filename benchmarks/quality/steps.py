# SPDX-License-Identifier: Apache-2.0
"""What the node changes from one sparse step of a sampling run to the next."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.quality import library
from benchmarks.quality.dit import DENSE_STEPS, STEPS, DenseRun
from benchmarks.quality.modes import Mode
from sparge.plan.budget import HeadBudget
from sparge.plan.grid import TokenOrder

SPARSE_STEPS = STEPS - DENSE_STEPS


class SparseSteps:
    """The orders that steps take in turn, and their budgets.

    budgets: of each step and layer; of one step where all are equal.
    """

    def __init__(self, run: DenseRun, mode: Mode, budgets: Sequence[Sequence[HeadBudget]]) -> None:
        device = run.begun.device
        self._mode, self._budgets = mode, budgets
        self._orders = [library.order_of(mode, run.grid, device, n) for n in range(mode.turns)]
        self._step = -1

    def of_call(self, layer: int) -> tuple[TokenOrder | None, HeadBudget]:
        """Of the next call, which is one of `layer`; the first layer begins a step, and after the
        last step comes another run."""
        if layer == 0:
            self._step = (self._step + 1) % SPARSE_STEPS
        budgets = self._budgets[min(self._step, len(self._budgets) - 1)]
        return self._orders[(DENSE_STEPS + self._step) % self._mode.turns], budgets[layer]
