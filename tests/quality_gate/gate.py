# SPDX-License-Identifier: Apache-2.0
"""Floors of the auto modes on clips of a trained model, and sentences about what is below."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.quality.dit import STEPS
from benchmarks.tiny_video_dit.curriculum import FULL_GRID
from sparge.session import Aim

from .clips import Found, GateClips

FLOORS = Path(__file__).parent / "floors.json"
#: Decibels below its floor, and share of pairs above it, that a mean over clips may lie: other CPUs
#: and GPUs round other ties.
SLACK, DENSER = 0.2, 0.01
#: Decibels that auto is ahead of plain dropping at the same density, at least.
LEAD = 3.0


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

    @property
    def aims(self) -> list[Aim]:
        budgets = [Aim("budget", density) for density in self.budgets]
        return budgets + [Aim("quality", target) for target in self.targets]

    def clips(self, weights: Path | None = None) -> GateClips:
        return GateClips(self.size, self.seeds, weights, self.steps)

    def found(self, clips: GateClips) -> dict[str, Found]:
        """Means over the clips and draws, by aim."""
        return {str(aim): clips.auto(aim, self.draws) for aim in self.aims}

    def floors(self) -> dict[str, Found]:
        """Stored floors by aim."""
        stored = json.loads(FLOORS.read_text("utf-8"))[self.name]
        return {aim: Found(**numbers) for aim, numbers in stored.items()}

    def store(self, found: dict[str, Found]) -> None:
        stored = json.loads(FLOORS.read_text("utf-8")) if FLOORS.exists() else {}
        stored[self.name] = {
            aim: {name: round(number, 3) for name, number in asdict(of_aim).items()}
            for aim, of_aim in found.items()
        }
        FLOORS.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")


#: On a CPU, by the reference: one clip of 1,152 tokens.
SMALL = Gate("small clip", (8, 12, 12), (0,), (0.3,), (0.06,), steps=10, draws=3)
#: On a GPU: clips of 21,420 tokens, as the models are trained on.
FULL = Gate("full clips", FULL_GRID, (0, 1, 2), budgets=(0.2, 0.3), targets=(0.06,))


def below_floors(found: dict[str, Found], floors: dict[str, Found]) -> Iterator[str]:
    """A sentence for each aim that is missed."""
    for aim, floor in floors.items():
        psnr, density = found[aim].psnr, found[aim].density
        if psnr < floor.psnr - SLACK:
            yield f"{aim}: {psnr:.2f} dB, {floor.psnr - psnr:.2f} dB below the stored floor."
        if density > floor.density + DENSER:
            yield f"{aim}: density {density:.3f}, stored {floor.density:.3f}."


def behind_drop(gate: Gate, found: dict[str, Found], clips: GateClips) -> Iterator[str]:
    """A sentence for each budget that is not ahead of plain dropping by LEAD."""
    for density in gate.budgets:
        lead = found[str(Aim("budget", density))].psnr - clips.drop(density).psnr
        if lead < LEAD:
            yield f"Density {density:g}: {lead:.2f} dB ahead of plain dropping; {LEAD:g} at least."
