# SPDX-License-Identifier: Apache-2.0
"""Measures the speed table of a GPU: each way at three lengths, least times, in about a second."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..attention import attention
from ..blocks import KEY_BLOCK
from ..head_settings import HeadSettings, Router
from ..kernels.spec import HEAD_DIMS
from ..order.grid import TokenGrid, grid_order
from ..policy import EIGHT_BIT_DENSE, SparsePolicy
from ..stages.as_written import as_written
from .backend import Backend
from .table import LEAST_MARGIN, Cost, Size, SpeedTable, Times

HEADS = 12
GRIDS = (TokenGrid(6, 16, 16), TokenGrid(6, 32, 32), TokenGrid(18, 32, 32))
#: Densities of sparse calls, in every grid and in the largest alone.
DENSITY, OTHER_DENSITY = 0.25, 0.05
#: Most and fewest timed calls of a cell, and seconds after which it has had enough.
MOST_CALLS, FEWEST_CALLS = 6, 2
SECONDS_A_CELL = 0.05
#: Clock cycles in which the GPU sleeps while the host queues a call: about 1 ms.
ASLEEP = 2_000_000

Work = Callable[[], object]


@dataclass(frozen=True)
class Cell:
    """Least seconds of one call: of the GPU, and in which the host queued it."""

    size: Size
    share: float
    """Share of its pairs that it computes."""
    gpu: float
    host: float


def measure_speed(device: torch.device, backend: Backend, facts: Mapping[str, str]) -> SpeedTable:
    """Times calls of random tensors. Waits for the GPU.

    Raises sparge.Unsupported and KernelBuildError where the kernels cannot run, and
    torch.OutOfMemoryError.
    """
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with torch.inference_mode(), torch.cuda.device(device), as_written(device):
        times = {head_dim: _times(head_dim, device, backend) for head_dim in HEAD_DIMS}
        torch.cuda.empty_cache()  # what calls took is of no size that a model asks for
    return SpeedTable(facts, created, times)


def _times(head_dim: int, device: torch.device, backend: Backend) -> Times:
    ways: dict[str, list[Cell]] = {"exact": [], "eight_bit": [], "sparse": []}
    for grid in GRIDS:
        size = Size(grid.tokens, HEADS, head_dim)
        qkv = random_qkv(size, device)
        densities = (DENSITY, OTHER_DENSITY) if grid == GRIDS[-1] else (DENSITY,)
        for way, share, work in works(grid, qkv, backend, densities):
            ways[way].append(Cell(size, share, *least_seconds(work)))
        grid_order(grid).forget_copies()
    fitted = {way: fit(cells, of_tokens=way != "exact") for way, cells in ways.items()}
    misfits = [misfit(fitted[way], cells) for way, cells in ways.items()]
    return Times(**fitted, margin=max(LEAST_MARGIN, *misfits))


def random_qkv(size: Size, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v of a call of that size, bf16 (1, H, N, D), the same each time."""
    shape = (1, size.heads, size.tokens, size.head_dim)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = torch.randn((3, *shape), generator=generator, device=device, dtype=torch.bfloat16)
    return q, k, v


def works(
    grid: TokenGrid,
    qkv: tuple[Tensor, Tensor, Tensor],
    backend: Backend,
    densities: Sequence[float],
) -> Iterator[tuple[str, float, Work]]:
    """Yields way, share of the pairs, and a call without arguments: exact, 8-bit dense, and sparse
    at each density. qkv: each (B, H, grid.tokens, D)."""
    heads, device = qkv[0].shape[1], qkv[0].device
    yield "exact", 1.0, partial(backend.attend, *qkv)
    yield "eight_bit", 1.0, partial(attention, *qkv, EIGHT_BIT_DENSE)
    order = grid_order(grid).on(device)
    for density in densities:
        settings = HeadSettings.uniform(heads, density, 1.0, Router.ERROR, device)
        call = partial(attention, *qkv, SparsePolicy(), order=order, head_settings=settings)
        yield "sparse", density + 1 / KEY_BLOCK, call


def least_seconds(work: Work) -> tuple[float, float]:
    """Least seconds of the GPU, and of the host. A GPU that others use is slower now and then."""
    work()
    torch.cuda.synchronize()
    began, gpu, host = time.perf_counter(), [], []
    while len(gpu) < FEWEST_CALLS or (
        len(gpu) < MOST_CALLS and time.perf_counter() - began < SECONDS_A_CELL
    ):
        seconds = time_once(work)
        gpu.append(seconds[0])
        host.append(seconds[1])
    return min(gpu), min(host)


def time_once(work: Work) -> tuple[float, float]:
    """Seconds of the GPU, and those in which the host queued it. Waits for the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(ASLEEP)
    queued = time.perf_counter()
    start.record()
    work()
    end.record()
    host = time.perf_counter() - queued
    end.synchronize()
    return start.elapsed_time(end) / 1000, host


def fit(cells: Sequence[Cell], of_tokens: bool) -> Cost:
    """Rates, none below 0, with the least sum of squared relative misfits. of_tokens: whether the
    way takes time for each token."""
    terms = np.array([[1.0, c.size.rows * of_tokens, c.size.pairs * c.share] for c in cells])
    seconds = np.array([cell.gpu for cell in cells])
    relative, best, least = terms / seconds[:, None], np.zeros(3), np.inf
    for some in itertools.chain.from_iterable(
        itertools.combinations(range(3), n) for n in (1, 2, 3)
    ):
        found = np.zeros(3)
        found[list(some)] = np.linalg.lstsq(relative[:, some], np.ones(len(cells)), rcond=None)[0]
        off = float(np.square(relative @ found - 1).sum())
        if found.min() >= 0 and off < least:
            best, least = found, off
    return Cost(min(cell.host for cell in cells), *map(float, best))


def misfit(cost: Cost, cells: Sequence[Cell]) -> float:
    """Largest relative misfit."""
    return max(abs(cost.gpu(cell.size, cell.share) / cell.gpu - 1) for cell in cells)
