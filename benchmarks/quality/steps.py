# SPDX-License-Identifier: Apache-2.0
"""What the node changes from one sparse step of a sampling run to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.quality import library
from benchmarks.quality.dit import DENSE_STEPS, STEPS, DenseRun
from benchmarks.quality.modes import Mode
from sparge.calibrate import falling
from sparge.plan.budget import HeadBudget
from sparge.plan.grid import TokenOrder

LAST = STEPS - DENSE_STEPS - 1


class SparseSteps:
    """The orders that steps take in turn, and the densities of measured heads, which fall.

    budgets: of each layer; their densities are means over the steps.
    """

    def __init__(self, run: DenseRun, mode: Mode, budgets: Sequence[HeadBudget]) -> None:
        device = run.begun.device
        self._mode, self._mean, self._budgets = mode, budgets, list(budgets)
        self._orders = [library.order_of(mode, run.grid, device, n) for n in range(mode.turns)]
        self._step = -1

    def of_call(self, layer: int) -> tuple[TokenOrder | None, HeadBudget]:
        """Of the next call, which is one of `layer`; the first layer begins a step, and after the
        last step comes another run."""
        if layer == 0:
            self._step = (self._step + 1) % (LAST + 1)
            self._fall()
        return self._orders[(DENSE_STEPS + self._step) % self._mode.turns], self._budgets[layer]

    def _fall(self) -> None:
        if not self._mode.measured:
            return
        mean = torch.stack([budget.density for budget in self._mean])
        order = self._orders[0]
        assert order is not None  # measured heads have walks
        density = falling(mean.cpu(), self._step / LAST, order.key_blocks).to(mean.device)
        self._budgets = [
            replace(budget, density=own, _tables={})
            for budget, own in zip(self._mean, density, strict=True)
        ]
