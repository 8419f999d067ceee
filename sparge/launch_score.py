# SPDX-License-Identifier: Apache-2.0
"""Fills the parameter block of the kernel that scores calibration's candidates, and queues it."""

from __future__ import annotations

from torch import Tensor

from .kernels.params import ScoreParams
from .launch import queue, view_of
from .plan.blocks import block_count
from .workspace import CallShape

_WARPS = 8  # rows that a thread block takes


def score(
    exact: tuple[Tensor, Tensor, Tensor],
    pooled: tuple[Tensor, Tensor, Tensor],
    unit: Tensor,
    ends: int,
    found: Tensor,
    dense: Tensor | None,
) -> None:
    """Writes ``found``; shapes as in ``csrc/params.cuh``, of ``dense`` in any strides but a
    contiguous last dimension.

    exact, pooled: sums, maxima and sums of weights, as in partial results.
    """
    exact_out, exact_max, exact_sum = exact
    pooled_out, pooled_max, pooled_sum = pooled
    batch, heads, routers, pieces, rows, channels = exact_out.shape
    router_stride, field_stride, batch_stride, head_stride, _ = found.stride()
    params = ScoreParams(
        exact_out=exact_out.data_ptr(),
        exact_max=exact_max.data_ptr(),
        exact_sum=exact_sum.data_ptr(),
        pooled_out=pooled_out.data_ptr(),
        pooled_max=pooled_max.data_ptr(),
        pooled_sum=pooled_sum.data_ptr(),
        unit=unit.data_ptr(),
        found=found.data_ptr(),
        dense=view_of(dense),
        router_stride=router_stride,
        field_stride=field_stride,
        batch_stride=batch_stride,
        head_stride=head_stride,
        batch=batch,
        heads=heads,
        routers=routers,
        densities=pooled_out.shape[3] + 1,
        pieces=pieces,
        ends=ends,
        rows=rows,
        channels=channels,
    )
    shape = CallShape(batch, heads, heads, rows, 0, channels)
    grid = (block_count(batch * heads * routers * rows, _WARPS), 1, 1)
    queue("score", exact_out.device, shape, grid, params)
