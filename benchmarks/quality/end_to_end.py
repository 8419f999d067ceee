# SPDX-License-Identifier: Apache-2.0
"""Whole clips of the small video DiT: sampled in a mode, against the same clip sampled dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

import torch
from torch import Tensor

import sparge
from benchmarks.quality import library
from benchmarks.quality.dit import DenseRun, named
from benchmarks.quality.heads import JudgedHeads
from benchmarks.quality.judge import psnr
from benchmarks.quality.modes import BY_NAME, ELEMENT, Mode, attend, reached_density, uniform
from benchmarks.quality.rows import Row
from benchmarks.quality.steps import Budgets, SameBudgets, SparseSteps, TunedHeads
from benchmarks.quality.targets import AUTO_QUALITY
from benchmarks.quality.walks import by_walk, of_heads
from benchmarks.tiny_video_dit.model import Attention
from sparge.reference.packed import pack_qkv, scatter
from sparge.tune import Aim

#: Attention of a model in a mode with these head settings, and a function that says its mean
#: density.
Attending = Callable[[DenseRun, Mode, Budgets], tuple[Attention, Callable[[], float]]]


class Clips:
    """Dense runs, each measured in its own last dense step, as the node measures each run."""

    def __init__(self, runs: Sequence[DenseRun]) -> None:
        self.runs = runs
        self.name = named(runs[0].grid, f"clips {runs[0].seed}-{runs[-1].seed}")

    def row(self, mode: Mode, density: float, attending: Attending) -> Row:
        """Row at a mean density."""
        named = {"data": self.name, "mode": mode.name, "asked_density": density}
        return named | self._sampled(mode, Aim("budget", density), attending)

    def target_row(self, target: float, attending: Attending) -> Row:
        """Row at the density that a mean error of the heads takes, as mode auto quality does."""
        named = {"data": self.name, "mode": AUTO_QUALITY, "target": target}
        return named | self._sampled(BY_NAME["ours auto"], Aim("quality", target), attending)

    def _sampled(self, mode: Mode, aim: Aim, attending: Attending) -> Row:
        """Row of sampled clips: PSNR in decibels and mean density of the sparse steps, means over
        clips; of measured heads also how near they came to what was expected of them."""
        found, densities, heads = [], [], []
        for index, run in enumerate(self.runs):
            budgets = self._budgets(index, mode, aim, judged=True)
            attention, reached = attending(run, mode, budgets)
            found.append(clip_psnr(run.finished(attention), run.clip))
            densities.append(reached())
            if isinstance(budgets, TunedHeads):
                heads.append(budgets.judged_heads())
        judged = JudgedHeads.of_clips(heads).shares() if heads else {}
        figures = {"density": mean(densities), "psnr": mean(found), "worst_psnr": min(found)}
        return figures | judged

    def budgets(self, index: int, mode: Mode, density: float) -> Budgets:
        """Head settings for one of the clips at a mean density."""
        return self.budgets_for(index, mode, Aim("budget", density))

    def budgets_for(self, index: int, mode: Mode, aim: Aim) -> Budgets:
        """Head settings for one of the clips and an aim."""
        return self._budgets(index, mode, aim, judged=False)

    def _budgets(self, index: int, mode: Mode, aim: Aim, *, judged: bool) -> Budgets:
        """judged: as in `TunedHeads`."""
        run = self.runs[index]
        if mode.measured:
            return TunedHeads(run, aim, judged=judged)
        assert aim.target is None  # heads that are not measured have a density alone
        budget = uniform(mode, run.model.config.heads, aim.value).on(run.begun.device)
        return SameBudgets(run, mode, budget)


def clip_psnr(clip: Tensor, truth: Tensor) -> float:
    """Decibels of the range 1 over the root mean square error; `inf` for equal clips."""
    return psnr(clip, truth, extent=1.0)


def emulated(run: DenseRun, mode: Mode, budgets: Budgets) -> tuple[Attention, Callable[[], float]]:
    steps = SparseSteps(budgets)
    densities: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        order, of_layer = steps.of_call(block, q, k, v)
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
    steps = SparseSteps(budgets)
    stats = sparge.AttentionStats(run.begun.device)

    def attention(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        order, budget = steps.of_call(block, q, k, v)
        out = library.attention(mode, q, k, v, budget, order, stats).to(q.dtype)
        budgets.see(block, q, k, v, out)
        return out

    def density() -> float:
        return stats.density

    return attention, density
