# SPDX-License-Identifier: Apache-2.0
"""Head settings from one sparse step of a sampling run to the next, as the node changes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import sparge
from benchmarks.quality import library
from benchmarks.quality.dit import DENSE_STEPS, STEPS, DenseRun
from benchmarks.quality.heads import JudgedHeads
from benchmarks.quality.modes import BY_NAME, Mode
from benchmarks.shares import share_of
from sparge.calibrate import Aim, Calibration, Probe, StepChoices
from sparge.plan.blocks import KEY_BLOCK, block_count, whole_steps
from sparge.plan.budget import HeadBudget
from sparge.plan.grid import TokenOrder

SPARSE_STEPS = STEPS - DENSE_STEPS


class SameBudgets:
    """Same head settings in all steps, by layer."""

    def __init__(self, budgets: Sequence[HeadBudget]) -> None:
        self._budgets = budgets

    def begin_step(self, step: int) -> None:
        pass

    def of_layer(self, layer: int) -> HeadBudget:
        return self._budgets[layer]

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        pass


class ChosenBudgets:
    """Head settings that the node gives to an aim, step by step; all layers were measured."""

    def __init__(
        self, calibration: Calibration, aim: Aim, device: torch.device, *, judged: bool = False
    ) -> None:
        """Starts a run. judged: compare every call with exact attention, of no use to a timed
        run.
        """
        self._calibration, self._device, self._judged = calibration, device, judged
        self._aim = aim
        self.found: list[Tensor] = []
        """(heads,) float64 of each call of the last run where judged: its relative L2 error."""
        self.expected: list[Tensor] = []
        """(heads,) float64 for each call of the last run: errors that the choices expect."""
        self.dropped: list[Tensor] = []
        """(heads,) float64 for each call: errors of upstream's drop of the same tensors, at each
        head's own density."""
        self.loudness: list[Tensor] = []
        """(heads,) for each call: head weights of the choices."""

    def begin_step(self, step: int) -> None:
        if step == 0:
            self._choices = StepChoices(self._aim, SPARSE_STEPS, calibration=self._calibration)
            layers, heads = self._choices.first.pooling.error.shape
            self._probe = Probe.begin(
                layers=layers,
                heads=heads,
                workload=self._calibration.workload,
                device=self._device,
            )
            for judged in self._judgement():
                judged.clear()
        if self._choices.is_due(step):
            self._choices.choose_anew(step, self._probe.drift())
        self._now = self._choices.at(step)
        self._probe.expect(self._now)
        self._budgets = self._now.budgets(self._device)
        self._step = step

    def of_layer(self, layer: int) -> HeadBudget:
        budget = self._budgets[layer]
        assert budget is not None
        return budget

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Takes the result of a call."""
        if (visit := self._choices.visit(layer, self._step)) is not None:
            self._probe.sample(layer, q, k, v, out, visit=visit)
        if self._choices.again is not None:
            self._choices.again.sample(layer, q, k, v)
        if self._judged:
            exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).double()
            self.found.append(_relative(out, exact))
            self.expected.append(self._now.error[layer].double())
            self.dropped.append(_relative(_drop(q, k, v, self.of_layer(layer)), exact))
            self.loudness.append(self._now.loudness[layer].double())

    def _judgement(self) -> tuple[list[Tensor], ...]:
        """Tensors in the order of `JudgedHeads`."""
        return self.found, self.expected, self.dropped, self.loudness

    def judged_heads(self) -> JudgedHeads:
        """Judged heads of the last run, one clip."""
        of_calls = (torch.stack(judged) for judged in self._judgement())
        return JudgedHeads(*(x.unflatten(0, (1, SPARSE_STEPS, -1)) for x in of_calls))


def _relative(out: Tensor, exact: Tensor) -> Tensor:
    """(heads,) float64 on the CPU: relative L2 errors."""
    error, norm = (x.square().sum((0, 2, 3)) for x in (out.double() - exact, exact))
    return (error / norm).sqrt().cpu()


def _drop(q: Tensor, k: Tensor, v: Tensor, budget: HeadBudget) -> Tensor:
    """Result of upstream's drop in a call, with as many blocks as the head settings keep."""
    zeros = torch.zeros_like(budget.gain)
    blocks = block_count(k.shape[2], KEY_BLOCK)
    asked = (budget.density * blocks).long().clamp(min=budget.floor)
    kept = whole_steps(asked, zeros.long())  # without text nothing is forced
    density = torch.tensor([share_of(count, blocks) for count in kept.tolist()]).to(zeros)
    plain = HeadBudget(density, zeros, zeros.int())
    stats = sparge.AttentionStats(q.device)
    return library.attention(BY_NAME["drop"], q, k, v, plain, None, stats)


Budgets = SameBudgets | ChosenBudgets


class SparseSteps:
    """Token orders that steps take in turn, and their head settings."""

    def __init__(self, run: DenseRun, mode: Mode, budgets: Budgets) -> None:
        device = run.begun.device
        self._mode, self._budgets = mode, budgets
        self._orders = [library.order_of(mode, run.grid, device, n) for n in range(mode.turns)]
        self._step = -1

    def of_call(self, layer: int) -> tuple[TokenOrder | None, HeadBudget]:
        """Order and head settings of the next call, which is one of `layer`.

        The first layer begins a step, and after the last step comes another run.
        """
        if layer == 0:
            self._step = (self._step + 1) % SPARSE_STEPS
            self._budgets.begin_step(self._step)
        order = self._orders[(DENSE_STEPS + self._step) % self._mode.turns]
        return order, self._budgets.of_layer(layer)
