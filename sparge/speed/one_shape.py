# SPDX-License-Identifier: Apache-2.0
"""Seconds of one attention call on this GPU: exact, 8-bit dense, and sparse at some densities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..order.grid import TokenGrid, grid_order
from ..stages.as_written import as_written
from .backend import Backend
from .table import Size
from .timing import least_seconds, random_qkv, works


@dataclass(frozen=True)
class ShapeTimes:
    """Least seconds of the GPU."""

    exact: float
    eight_bit: float
    sparse: Mapping[float, float]
    """Seconds of a sparse call, by the density that it keeps."""

    @property
    def dense(self) -> float:
        """Seconds of a dense call of the auto modes, which takes the faster way."""
        return min(self.exact, self.eight_bit)


def time_shape(
    grid: TokenGrid,
    heads: int,
    head_dim: int,
    device: torch.device,
    backend: Backend,
    densities: Sequence[float],
) -> ShapeTimes:
    """Times calls of random bf16 tensors (1, heads, grid.tokens, head_dim). Waits for the GPU.

    Raises sparge.Unsupported and KernelBuildError where the kernels cannot run, and
    torch.OutOfMemoryError.
    """
    with torch.inference_mode(), torch.cuda.device(device), as_written(device):
        qkv = random_qkv(Size(grid.tokens, heads, head_dim), device)
        calls = works(grid, qkv, backend, densities)
        exact, eight_bit, *sparse = (least_seconds(work)[0] for _, _, work in calls)
        grid_order(grid).forget_copies()
    return ShapeTimes(exact, eight_bit, dict(zip(densities, sparse, strict=True)))
