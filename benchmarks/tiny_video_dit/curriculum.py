# SPDX-License-Identifier: Apache-2.0
"""Curriculum: which clips a training step sees.

Small clips come first, where a second buys most steps, then the size that is judged. Grids count
tokens (frames, rows, columns); a token is 1 x 4 x 8 pixels. All sizes show the same world at the
same scale, smaller ones less of it, so what is learnt carries over. None divides by the kernels'
blocks or cubes: neither do real videos.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Grid of ComfyUI's empty latent of 480 x 544 with 81 frames: 21,420 tokens, clips of 240 x 136
#: pixels with 21 frames.
FULL_GRID = (21, 34, 30)
WARM_UP = 0.015  # of the training
PEAK_RATE = 1.5e-3
LAST_RATE = 1e-5


@dataclass(frozen=True)
class Batch:
    grid: tuple[int, int, int]
    clips: int

    @property
    def tokens(self) -> int:
        return self.clips * math.prod(self.grid)


@dataclass(frozen=True)
class Phase:
    """Batches taken in turn until this share of the training time is over."""

    until: float
    batches: tuple[Batch, ...]


SMALL = (Batch((9, 16, 14), 32), Batch((5, 20, 18), 36))
MIDDLE = (Batch((13, 24, 20), 10), Batch((17, 20, 22), 9))
FULL = Batch(FULL_GRID, 3)
#: About 65,000 tokens a step throughout. The last phase mixes in middle sizes: more scenes for the
#: same time, and attention over a full clip is most of a step's cost.
PHASES = (
    Phase(0.4, SMALL),
    Phase(0.65, (*MIDDLE, SMALL[0])),
    Phase(1.0, (FULL, FULL, MIDDLE[0], FULL, FULL, MIDDLE[1])),
)


def batch_at(step: int, progress: float, phases: tuple[Phase, ...] = PHASES) -> Batch:
    """The batch of a step, `progress` in [0, 1] through the training."""
    phase = next((phase for phase in phases if progress < phase.until), phases[-1])
    return phase.batches[step % len(phase.batches)]


def rate_at(progress: float) -> float:
    """Linear warm-up, then a cosine."""
    if progress < WARM_UP:
        return PEAK_RATE * (progress + 1e-4) / WARM_UP
    along = min(1.0, (progress - WARM_UP) / (1 - WARM_UP))
    return LAST_RATE + (PEAK_RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * along))
