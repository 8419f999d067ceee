# SPDX-License-Identifier: Apache-2.0
"""Cost of an instruction of a warp: the pipe that it fills, for how long, and when its result is
there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from .chips import SCHEDULERS, Chip
from .kinds import Kind, kind_of
from .sass import Instruction


class Pipe(str, Enum):
    """Pipes of one scheduler, as the tables call them. Shared memory is the SM's: its clocks are
    those of a scheduler's share of it."""

    TENSOR = "tensor"
    XU = "XU"
    FMA = "FMA"
    """Either of two."""
    FMA_HEAVY = "heavy FMA"
    """The one of the two that multiplies integers."""
    ALU = "ALU"
    SHARED = "shared memory"
    NONE = "none"


@dataclass(frozen=True)
class Cost:
    """Clocks. ``latency`` is from the start in the pipe to the first use of the result."""

    pipe: Pipe
    clocks: float
    latency: float


FMA_PIPES = 2
#: An SM's shared memory moves 128 bytes a clock: 512 bytes of a warp take 4, or 16 of a share.
_WORD = float(SCHEDULERS)
_BARRIER_LATENCY = 30
_PRODUCT_LATENCY = 33, 18  # at least, and beyond the time in the pipe

_FIXED = {
    Kind.MUFU: Cost(Pipe.XU, 8, 22),
    Kind.CONVERT: Cost(Pipe.ALU, 2, 6),
    Kind.SLOW_CONVERT: Cost(Pipe.XU, 8, 22),
    Kind.FLOAT: Cost(Pipe.FMA, 2, 4),
    Kind.MAXIMUM: Cost(Pipe.ALU, 2, 5),
    Kind.MULTIPLY: Cost(Pipe.FMA_HEAVY, 2, 5),
    Kind.ALU: Cost(Pipe.ALU, 2, 5),
    Kind.UNIFORM: Cost(Pipe.NONE, 1, 6),
    Kind.SHFL: Cost(Pipe.SHARED, _WORD, 25),
    Kind.MEMORY: Cost(Pipe.NONE, 1, 30),
    Kind.BARRIER: Cost(Pipe.NONE, 1, _BARRIER_LATENCY),
    Kind.BRANCH: Cost(Pipe.NONE, 1, 10),
    Kind.IDLE: Cost(Pipe.NONE, 1, 2),
}
_SHARED_LATENCY = {Kind.LDSM: 33, Kind.LDS: 29, Kind.STS: 1, Kind.LDGSTS: 1}


def cost(instruction: Instruction, chip: Chip) -> Cost:
    """Raises ValueError for a product whose rate is not known."""
    kind = kind_of(instruction)
    if kind is Kind.TENSOR:
        clocks = chip.product_clocks(instruction)
        least, beyond = _PRODUCT_LATENCY
        return Cost(Pipe.TENSOR, clocks, max(least, clocks + beyond))
    if kind in _SHARED_LATENCY:
        return Cost(Pipe.SHARED, instruction.words * _WORD, _SHARED_LATENCY[kind])
    return _FIXED[kind]


def pipe_clocks(path: Iterable[Instruction], chip: Chip) -> dict[str, float]:
    """Clocks for which a pass of one warp fills each pipe; ``issue`` is its instructions."""
    sums = dict.fromkeys(Pipe, 0.0)
    issued = 0
    for instruction in path:
        issued += 1
        own = cost(instruction, chip)
        sums[own.pipe] += own.clocks
    heavy = sums[Pipe.FMA_HEAVY]
    sums[Pipe.FMA] = max((sums[Pipe.FMA] + heavy) / FMA_PIPES, heavy)
    shown = (Pipe.TENSOR, Pipe.XU, Pipe.FMA, Pipe.ALU, Pipe.SHARED)
    return {"issue": float(issued), **{pipe.value: sums[pipe] for pipe in shown}}
