# SPDX-License-Identifier: Apache-2.0
"""Clips of a small trained video DiT: sampled sparse, against the same clips sampled dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch

from benchmarks.quality.dit import STEPS, DenseRun, load_dit, sample_dense
from benchmarks.quality.end_to_end import Clips, clip_psnr, in_library
from benchmarks.quality.modes import BY_NAME, Mode
from sparge.session import Aim

AUTO, DROP = BY_NAME["ours auto"], BY_NAME["drop"]


@dataclass(frozen=True)
class Found:
    """Mean over clips: PSNR against the dense clip, in decibels, and share of query-key pairs that
    the sparse steps compute."""

    psnr: float
    density: float


class GateClips:
    """Dense clips of one model on one grid, and the same clips sampled sparse.

    Sparse calls go through `sparge.attention`: the kernels on a GPU, the reference on a CPU.
    """

    def __init__(
        self,
        size: tuple[int, int, int],
        seeds: Sequence[int],
        weights: Path | None = None,
        steps: int = STEPS,
    ) -> None:
        """size: frames, rows, columns of tokens. weights: None for the shipped model."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_dit(weights, device)
        self._runs = [sample_dense(model, size, seed, steps) for seed in seeds]

    def auto(self, aim: Aim, draws: int) -> Found:
        """Heads are measured anew in each clip, as the node does it in each run, and in each draw
        of query blocks."""
        found = [self._sampled(run, AUTO, aim, n) for run in self._runs for n in range(draws)]
        return self._mean(found)

    def drop(self, density: float) -> Found:
        """SpargeAttn's own rule: a top-k of block means in every head, and the rest is gone."""
        aim = Aim("budget", density)
        return self._mean([self._sampled(run, DROP, aim) for run in self._runs])

    def _sampled(self, run: DenseRun, mode: Mode, aim: Aim, draw: int = 0) -> Found:
        clips = Clips([run])
        attention, density = in_library(run, mode, clips.budgets_for(0, mode, aim, draw=draw))
        return Found(clip_psnr(run.finished(attention), run.clip), density())

    @staticmethod
    def _mean(found: list[Found]) -> Found:
        return Found(mean(f.psnr for f in found), mean(f.density for f in found))
