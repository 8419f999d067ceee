# SPDX-License-Identifier: Apache-2.0
"""Whole clips of the small video DiT: sampled in a mode, against the same clip sampled dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from statistics import mean

import torch
from torch import Tensor

import sparge
from benchmarks.quality import library
from benchmarks.quality.dit import DenseRun, named
from benchmarks.quality.judge import psnr
from benchmarks.quality.measured import Measured
from benchmarks.quality.modes import ELEMENT, Mode, attend, reached_density, uniform
from benchmarks.quality.rows import Row
from benchmarks.quality.steps import Budgets, ChosenBudgets, SameBudgets, SparseSteps
from benchmarks.quality.walks import by_walk, of_heads
from benchmarks.tiny_video_dit.model import Attention
from sparge.calibrate import Aim
from sparge.reference.packed import pack_qkv, scatter

#: Attention of a model in a mode with these budgets, and a function that says its mean density.
Attending = Callable[[DenseRun, Mode, Budgets], tuple[Attention, Callable[[], float]]]

#: A factor between what heads err by and what is expected of them.
WITHIN = 1.5


class Clips:
    """Dense runs, each measured in its own last dense step, as the product measures each run."""

    def __init__(self, runs: Sequence[DenseRun], calibration_blocks: int) -> None:
        self.runs = runs
        self.name = named(runs[0].grid, f"clips {runs[0].seed}-{runs[-1].seed}")
        self._blocks = calibration_blocks

    @cached_property
    def _measured(self) -> list[Measured]:
        return [
            Measured.on(run.calibrated, len(run.model.blocks), self._blocks) for run in self.runs
        ]

    def row(self, mode: Mode, density: float, attending: Attending) -> Row:
        """PSNR of the clips in decibels and mean density of the sparse steps, means over clips; of
        measured heads also how many err as expected, within WITHIN."""
        found, densities, shares = [], [], []
        for index, run in enumerate(self.runs):
            budgets = self.budgets(index, mode, density, judged=True)
            attention, reached = attending(run, mode, budgets)
            found.append(clip_psnr(run.finished(attention), run.clip))
            densities.append(reached())
            if isinstance(budgets, ChosenBudgets):
                shares.append(budgets.within(WITHIN))
        return {
            "data": self.name,
            "mode": mode.name,
            "asked_density": density,
            "density": mean(densities),
            "psnr": mean(found),
            "worst_psnr": min(found),
            **{name: mean(each[name] for each in shares) for name in (shares and shares[0])},
        }

    def budgets(self, index: int, mode: Mode, density: float, *, judged: bool = False) -> Budgets:
        """For one of the clips. judged: as in `ChosenBudgets`."""
        run = self.runs[index]
        device = run.begun.device
        if mode.measured:
            calibration = self._measured[index].calibration
            return ChosenBudgets(calibration, Aim("budget", density), device, judged=judged)
        budget = uniform(mode, run.model.config.heads, density).on(device)
        return SameBudgets([budget] * len(run.model.blocks))


def clip_psnr(clip: Tensor, truth: Tensor) -> float:
    """Decibels of the range 1 over the root mean square error; `inf` for equal clips."""
    return psnr(clip, truth, extent=1.0)


def emulated(run: DenseRun, mode: Mode, budgets: Budgets) -> tuple[Attention, Callable[[], float]]:
    steps = SparseSteps(run, mode, budgets)
    densities: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        order, of_layer = steps.of_call(block)
        outs, reached = [], []
        for walk, budget in by_walk(of_layer):
            walked = None if order is None else order.walk(walk)
            packed = pack_qkv(q, k, v, walked, element=ELEMENT)
            out, choice = attend(mode, packed, budget, at_once=True)
            outs.append(out if walked is None else scatter(out, walked))
            reached.append(reached_density(choice))
        if len(outs) > 1:
            outs = [of_heads(of_layer, outs, dim=1)]
            reached = [of_heads(of_layer, reached)]
        densities.append(reached[0])
        out = outs[0].to(q.dtype)
        budgets.see(block, q, k, v, out)
        return out

    def density() -> float:
        return float(torch.stack(densities).mean())

    return attention, density


def in_library(
    run: DenseRun, mode: Mode, budgets: Budgets
) -> tuple[Attention, Callable[[], float]]:
    """Through `sparge.attention`."""
    steps = SparseSteps(run, mode, budgets)
    stats = sparge.AttentionStats(run.begun.device)

    def attention(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        order, budget = steps.of_call(block)
        out = library.attention(mode, q, k, v, budget, order, stats).to(q.dtype)
        budgets.see(block, q, k, v, out)
        return out

    def density() -> float:
        return stats.density

    return attention, density
