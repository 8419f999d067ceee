# SPDX-License-Identifier: Apache-2.0
"""Whole clips of the small video DiT: sampled in a mode, against the same clip sampled dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

from torch import Tensor

from benchmarks.quality import modes
from benchmarks.quality.dit import DenseRun, named
from benchmarks.quality.judge import psnr
from benchmarks.quality.modes import BY_NAME, Mode
from benchmarks.quality.rows import AUTO_QUALITY, Row
from benchmarks.quality.steps import Budgets, SameBudgets, SparseSteps, TunedHeads
from benchmarks.tiny_video_dit.model import Attention
from sparge.head_settings import HeadSettings
from sparge.session import Aim


class Clips:
    """Dense runs, each measured in its own last dense step, as the node measures each run."""

    def __init__(self, runs: Sequence[DenseRun]) -> None:
        self.runs = runs
        self.name = named(runs[0].grid, f"clips {runs[0].seed}-{runs[-1].seed}")

    def row(self, mode: Mode, density: float) -> Row:
        """Row at a mean density."""
        named = {"data": self.name, "mode": mode.name, "asked_density": density}
        return named | self._sampled(mode, Aim("budget", density))

    def target_row(self, target: float) -> Row:
        """Row at the density that a mean error of the heads takes, as mode auto quality does."""
        named = {"data": self.name, "mode": AUTO_QUALITY, "target": target}
        return named | self._sampled(BY_NAME["ours auto"], Aim("quality", target))

    def _sampled(self, mode: Mode, aim: Aim) -> Row:
        """Row of sampled clips: PSNR in decibels and mean density of the sparse steps, means over
        clips; of measured heads also their mean error by head weight, which is what targets are
        of, of all clips and of the worst."""
        found, densities, errors = [], [], []
        for index, run in enumerate(self.runs):
            budgets = self.budgets_for(index, mode, aim, judged=True)
            attention, reached = in_library(run, mode, budgets)
            found.append(clip_psnr(run.finished(attention), run.clip))
            densities.append(reached())
            if isinstance(budgets, TunedHeads):
                errors.append(budgets.mean_error())
        figures = {"density": mean(densities), "psnr": mean(found), "worst_psnr": min(found)}
        if errors:
            figures |= {"mean_error": mean(errors), "worst_mean_error": max(errors)}
        return figures

    def budgets_for(
        self, index: int, mode: Mode, aim: Aim, *, judged: bool = False, draw: int = 0
    ) -> Budgets:
        """Head settings for one of the clips and an aim; judged, draw: as in `TunedHeads`."""
        run = self.runs[index]
        if mode.measured:
            return TunedHeads(run, aim, judged=judged, draw=draw)
        assert aim.kind == "budget"  # heads that are not measured have a density alone
        head_settings = HeadSettings.uniform(run.model.config.heads, aim.value).on(run.begun.device)
        return SameBudgets(run, mode, head_settings)


def clip_psnr(clip: Tensor, truth: Tensor) -> float:
    """Decibels of the range 1 over the root mean square error; `inf` for equal clips."""
    return psnr(clip, truth, extent=1.0)


def in_library(
    run: DenseRun, mode: Mode, budgets: Budgets
) -> tuple[Attention, Callable[[], float]]:
    """Attention of a model in a mode with these head settings, and a function that says its mean
    density."""
    steps, densities = SparseSteps(budgets), []

    def attention(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        order, head_settings = steps.of_call(block, q, k, v)
        out, reached = modes.attention(mode, q, k, v, head_settings, order)
        out = out.to(q.dtype)
        budgets.see(block, q, k, v, out)
        densities.append(reached)
        return out

    return attention, lambda: mean(density() for density in densities)
