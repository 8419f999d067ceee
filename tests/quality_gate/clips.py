# SPDX-License-Identifier: Apache-2.0
"""Clips of a small trained video DiT: sampled sparse, against the same clips sampled dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch

from benchmarks.quality.dit import DenseRun, load_dit, sample_dense
from benchmarks.quality.end_to_end import Clips, clip_psnr, emulated, in_library
from benchmarks.quality.modes import BY_NAME, Mode
from sparge.calibrate import BLOCKS_A_CALL, Aim

AUTO, DROP = BY_NAME["ours auto"], BY_NAME["drop"]


@dataclass(frozen=True)
class Found:
    """Mean over clips: PSNR against the dense clip, in decibels, and share of query-key pairs that
    the sparse steps compute."""

    psnr: float
    density: float


class GateClips:
    """Dense clips of one model on one grid, and the same clips sampled sparse.

    On a GPU sparse calls go through `sparge.attention`; on a CPU through the emulation of
    `benchmarks.quality`, which computes the same in fewer and larger products.
    """

    def __init__(
        self, size: tuple[int, int, int], seeds: Sequence[int], weights: Path | None = None
    ) -> None:
        """size: frames, rows, columns of tokens. weights: None for the shipped model."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_dit(weights, device)
        self._attending = in_library if device.type == "cuda" else emulated
        self._runs = [sample_dense(model, size, seed) for seed in seeds]

    def auto(self, aim: Aim) -> Found:
        """Heads are measured anew in each clip, as the node does it in each run."""
        return self._mean([self._sampled(run, AUTO, aim) for run in self._runs])

    def drop(self, density: float) -> Found:
        """SpargeAttn's own rule: a top-k of block means in every head, and the rest is gone."""
        aim = Aim("budget", density)
        return self._mean([self._sampled(run, DROP, aim) for run in self._runs])

    def _sampled(self, run: DenseRun, mode: Mode, aim: Aim) -> Found:
        clips = Clips([run], 2 * BLOCKS_A_CALL)  # as the node measures one conditioning
        attention, density = self._attending(run, mode, clips.budgets_for(0, mode, aim))
        return Found(clip_psnr(run.finished(attention), run.clip), density())

    @staticmethod
    def _mean(found: list[Found]) -> Found:
        return Found(mean(f.psnr for f in found), mean(f.density for f in found))
