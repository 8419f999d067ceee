# SPDX-License-Identifier: Apache-2.0
"""One scheduler of an SM whose warps all pass through the same path again and again.

A warp issues in order, when what it reads and writes is ready and its pipe is free. Warps of one
thread block wait for each other at barriers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import fmean

from .chips import Chip
from .kinds import Kind, kind_of
from .pipes import FMA_PIPES, Cost, Pipe, cost
from .registers import access
from .sass import Instruction

_PASSES, _WARM_UP = 9, 3  # of each warp in the mean
_STARTS = 3  # random ones, with each policy
_LATEST_START = 6  # clocks an instruction of the path, by which thread blocks are apart at most
#: Clocks of work that may queue before a pipe until the scheduler stops.
_QUEUE = {Pipe.SHARED: 64.0, Pipe.XU: 32.0}


@dataclass(frozen=True)
class Warps:
    """Warps of one scheduler."""

    thread_blocks: int
    each: int
    """Warps of a thread block on this scheduler."""


@dataclass(frozen=True)
class _Step:
    cost: Cost
    needs: tuple[str, ...]
    """Registers that it reads, and those that it writes: an earlier result may not come later."""
    writes: tuple[str, ...]
    barrier: bool
    branch: bool


@dataclass
class _Warp:
    thread_block: int
    ready_at: float
    """When its next instruction can issue as far as the warp is concerned."""
    next: int = 0
    results: dict[str, float] = field(default_factory=dict)


def clocks_a_pass(path: Sequence[Instruction], chip: Chip, warps: Warps) -> float:
    """Clocks of the scheduler for one pass of one warp: mean of both policies and several starts.

    The greedy policy goes on with the warp that issued last, the other one takes warps in turns.
    """
    steps = [_step(instruction, chip) for instruction in path]
    latest = _LATEST_START * len(steps)
    chance = random.Random(1)
    runs = []
    for greedy in (True, False):
        for _ in range(_STARTS):
            starts = [chance.uniform(0, latest) for _ in range(warps.thread_blocks)]
            runs.append(_run(steps, warps, starts, greedy))
    return fmean(runs)


def _step(instruction: Instruction, chip: Chip) -> _Step:
    used = access(instruction)
    kind = kind_of(instruction)
    return _Step(
        cost(instruction, chip),
        (*used.reads, *used.writes),
        used.writes,
        kind is Kind.BARRIER,
        kind is Kind.BRANCH,
    )


def _run(steps: Sequence[_Step], of: Warps, starts: Sequence[float], greedy: bool) -> float:
    warps = [_Warp(b, starts[b]) for b in range(of.thread_blocks) for _ in range(of.each)]
    pipes = _Pipes()
    now, last = 0.0, 0
    ends: list[float] = []  # of passes of all warps
    while len(ends) < _PASSES * len(warps):
        times = [max(now, w.ready_at, pipes.free_at(steps[w.next].cost)) for w in warps]
        now = float(ceil(min(times)))
        order = _order(len(warps), last if greedy else last + 1)
        last = next(number for number in order if times[number] <= now)
        _issue(steps, warps, last, pipes, now)
        if warps[last].next == 0:
            ends.append(now)
        now += 1
    first = _WARM_UP * len(warps)
    return (ends[-1] - ends[first - 1]) / (len(ends) - first)


def _order(count: int, first: int) -> Iterator[int]:
    return ((first + number) % count for number in range(count))


def _issue(
    steps: Sequence[_Step], warps: Sequence[_Warp], number: int, pipes: _Pipes, now: float
) -> None:
    warp = warps[number]
    step = steps[warp.next]
    done = pipes.take(step.cost, now)
    for name in step.writes:
        warp.results[name] = done
    warp.next = (warp.next + 1) % len(steps)
    if step.barrier:
        warp.ready_at = inf
        together = [w for w in warps if w.thread_block == warp.thread_block]
        if all(w.ready_at == inf for w in together):
            for each in together:
                each.ready_at = _ready(steps, each, done)
    else:
        warp.ready_at = _ready(steps, warp, done if step.branch else now)


def _ready(steps: Sequence[_Step], warp: _Warp, earliest: float) -> float:
    times = (warp.results.get(name, 0.0) for name in steps[warp.next].needs)
    return max(earliest, *times, 0.0)


class _Pipes:
    """When each pipe of a scheduler is free again."""

    def __init__(self) -> None:
        self._free = dict.fromkeys(Pipe, 0.0)
        self._fma = [0.0] * FMA_PIPES  # the first is the heavy one

    def free_at(self, of: Cost) -> float:
        """When an instruction of that cost can issue."""
        if of.pipe is Pipe.FMA:
            return min(self._fma)
        if of.pipe is Pipe.FMA_HEAVY:
            return self._fma[0]
        return self._free[of.pipe] - _QUEUE.get(of.pipe, 0.0)

    def take(self, of: Cost, now: float) -> float:
        """Issues now; returns when the result is there."""
        if of.pipe in (Pipe.FMA, Pipe.FMA_HEAVY):
            number = 0 if of.pipe is Pipe.FMA_HEAVY else self._fma.index(min(self._fma))
            self._fma[number] = now + of.clocks
            return now + of.latency
        if of.pipe is Pipe.NONE:
            return now + of.latency
        start = max(now, self._free[of.pipe])
        self._free[of.pipe] = start + of.clocks
        return start + of.latency
