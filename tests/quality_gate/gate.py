# SPDX-License-Identifier: Apache-2.0
"""Clips of a small trained video DiT, sampled sparse, against the same clips sampled dense: floors
of the auto modes, and sentences about what is below.

Sparse calls go through `sparge.attention`: the kernels on a GPU, the reference on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import torch

from benchmarks.quality.dit import STEPS, DenseRun, load_dit, sample_dense
from benchmarks.quality.end_to_end import Clips, clip_psnr, in_library
from benchmarks.quality.modes import BY_NAME
from benchmarks.tiny_video_dit.checkpoint import STUDENTS, student
from benchmarks.tiny_video_dit.curriculum import FULL_GRID
from sparge.session import Aim

FLOORS = Path(__file__).parent / "floors.json"
#: Decibels below its floor, and share of pairs above it, that a mean over clips may lie: other CPUs
#: and GPUs round other ties.
SLACK, DENSER = 0.2, 0.01


@dataclass(frozen=True)
class Found:
    """Mean over clips: PSNR against the dense clip, in decibels, and share of query-key pairs that
    the sparse steps compute."""

    psnr: float
    density: float


@dataclass(frozen=True)
class Gate:
    """Clips of one model on one grid, and the aims that they are sampled with."""

    name: str
    size: tuple[int, int, int]
    """Frames, rows, columns of tokens."""
    seeds: tuple[int, ...]
    budgets: tuple[float, ...]
    """Mean densities of mode auto budget."""
    targets: tuple[float, ...]
    """Mean errors of mode auto quality."""
    steps: int = STEPS
    draws: int = 1
    """Draws of the query blocks that are measured: one moves a clip by up to 0.9 dB on a CPU."""
    student: Path | None = None
    """LoRA of a student of so few steps."""
    lead: float = 3.0
    """Decibels that auto is ahead of plain dropping at the same density, at least."""

    @property
    def aims(self) -> list[Aim]:
        budgets = [Aim("budget", density) for density in self.budgets]
        return budgets + [Aim("quality", target) for target in self.targets]

    def dense(self, weights: Path | None = None) -> list[DenseRun]:
        """Dense clips. weights: None for the shipped model."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_dit(weights, device, self.student)
        return [sample_dense(model, self.size, seed, self.steps) for seed in self.seeds]

    def found(self, clips: list[DenseRun]) -> dict[str, Found]:
        """Means over the clips and draws, by aim. Heads are measured anew in each clip, as the node
        does it in each run, and in each draw of query blocks."""
        return {str(aim): sampled(clips, "ours auto", aim, self.draws) for aim in self.aims}

    def floors(self) -> dict[str, Found]:
        """Stored floors by aim."""
        stored = json.loads(FLOORS.read_text("utf-8"))[self.name]
        return {aim: Found(**numbers) for aim, numbers in stored.items()}

    def store(self, found: dict[str, Found]) -> None:
        stored = json.loads(FLOORS.read_text("utf-8"))
        stored[self.name] = {
            aim: {name: round(number, 3) for name, number in asdict(of_aim).items()}
            for aim, of_aim in found.items()
        }
        FLOORS.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")


def sampled(clips: list[DenseRun], mode: str, aim: Aim, draws: int = 1) -> Found:
    """The clips sampled sparse, so many times each."""
    found = []
    for run in clips:
        budgets_for = Clips([run]).budgets_for
        for draw in range(draws):
            budgets = budgets_for(0, BY_NAME[mode], aim, draw=draw)
            attention, density = in_library(run, BY_NAME[mode], budgets)
            found.append((clip_psnr(run.finished(attention), run.clip), density()))
    return Found(*map(mean, zip(*found, strict=True)))


def dropped(clips: list[DenseRun], density: float) -> Found:
    """By SpargeAttn's own rule: a top-k of block means in every head, and the rest is gone."""
    return sampled(clips, "drop", Aim("budget", density))


#: On a CPU, by the reference: one clip of 1,152 tokens.
SMALL = Gate("small clip", (8, 12, 12), (0,), (0.3,), (0.06,), steps=10, draws=3)
#: On a GPU: clips of 21,420 tokens, as the models are trained on.
FULL = Gate("full clips", FULL_GRID, (0, 1, 2), budgets=(0.2, 0.3), targets=(0.06,))
#: On a GPU: such clips of the students, whose first step alone is dense.
FEW = {
    steps: Gate(
        f"{steps} steps",
        FULL_GRID,
        seeds=(0, 1, 2, 3),
        budgets=(0.2, 0.3),
        targets=(0.05,),
        steps=steps,
        student=student(steps),
        lead=2.0,
    )
    for steps in STUDENTS
}


def below_floors(found: dict[str, Found], floors: dict[str, Found]) -> Iterator[str]:
    """A sentence for each aim that is missed."""
    for aim, floor in floors.items():
        psnr, density = found[aim].psnr, found[aim].density
        if psnr < floor.psnr - SLACK:
            yield f"{aim}: {psnr:.2f} dB, {floor.psnr - psnr:.2f} dB below the stored floor."
        if density > floor.density + DENSER:
            yield f"{aim}: density {density:.3f}, stored {floor.density:.3f}."


def behind_drop(gate: Gate, found: dict[str, Found], clips: list[DenseRun]) -> Iterator[str]:
    """A sentence for each budget that is not ahead of plain dropping by as much as it should."""
    for density in gate.budgets:
        lead = found[str(Aim("budget", density))].psnr - dropped(clips, density).psnr
        if lead < gate.lead:
            least = f"{gate.lead:g} at least"
            yield f"Density {density:g}: {lead:.2f} dB ahead of plain dropping; {least}."
