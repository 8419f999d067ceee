# SPDX-License-Identifier: Apache-2.0
"""Launch of the kernel that scores calibration's candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import Unsupported
from .kernels import Element, capabilities
from .kernels.params import ScoreParams
from .kernels.spec import ARCHS
from .launch import queue, view_of
from .plan.blocks import block_count
from .workspace import CallShape, layout_of

_MOST_ROWS = 16  # rows that a thread block takes at most
_STEP = 8  # each bucket is filled to multiples of it in the list of dropped key blocks
_STATIC_SHARED = 2432  # bytes that the kernel declares itself


def score(
    exact: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    workspace: Tensor,
    shape: CallShape,
    element: Element,
    kept: Tensor,
    scale: float,
    ends: int,
    found: Tensor,
    dense: Tensor | None,
) -> None:
    """Writes ``found``; shapes as in ``csrc/params.cuh``, of ``q`` and ``dense`` in any strides but
    a contiguous last dimension.

    exact: sums, maxima and sums of weights, as in partial results. shape, element: of the call that
    quantized into ``workspace``.
    """
    exact_out, exact_max, exact_sum = exact
    batch, heads, routers, pieces, rows, channels = exact_out.shape
    densities, blocks = kept.shape[3] + 1, kept.shape[4]
    router_stride, field_stride, batch_stride, head_stride, _ = found.stride()
    address = layout_of(shape, element, True, False, True).addresses(workspace).get
    rows_a_block = rows // blocks
    rows_per_cta = _rows_per_cta(shape, densities - 1, rows_a_block, exact_out.device)
    params = ScoreParams(
        exact_out=exact_out.data_ptr(),
        exact_max=exact_max.data_ptr(),
        exact_sum=exact_sum.data_ptr(),
        q=view_of(q),
        dense=view_of(dense),
        k_block_mean=address("k_block_mean"),
        v_block_mean=address("v_block_mean"),
        v_mean=address("v_mean"),
        key_counts=address("key_counts"),
        kept=kept.data_ptr(),
        found=found.data_ptr(),
        router_stride=router_stride,
        field_stride=field_stride,
        batch_stride=batch_stride,
        head_stride=head_stride,
        scale=scale,
        heads=heads,
        kv_heads=shape.kv_heads,
        routers=routers,
        densities=densities,
        pieces=pieces,
        ends=ends,
        blocks=blocks,
        rows=rows,
        channels=channels,
        key_blocks=shape.key_blocks,
        room=_room(shape.key_blocks, densities - 1),
        rows_per_cta=rows_per_cta,
    )
    groups = block_count(rows_a_block, rows_per_cta)
    grid = (batch * heads * routers * blocks * groups, 1, 1)
    shared = shared_bytes(shape, densities - 1, rows_per_cta)
    queue("score", exact_out.device, shape, grid, params, extra_shared=shared)


def shared_bytes(shape: CallShape, pooling: int, rows: int) -> int:
    """Bytes of dynamic shared memory of a thread block of so many rows; ``Shared`` of
    csrc/score/place.cuh."""
    room = _room(shape.key_blocks, pooling)
    queries = 2 * _MOST_ROWS * shape.head_dim
    weights = min(rows, 2) * block_count(rows, 2) * (block_count(room, 16) * 16 + 8)
    return 4 * (max(queries, pooling * rows * shape.head_dim) + weights + room) + 2 * room


def _room(key_blocks: int, pooling: int) -> int:
    return key_blocks + pooling * (_STEP - 1)


def _rows_per_cta(shape: CallShape, pooling: int, rows: int, device: torch.device) -> int:
    """Most rows of a query block that fit in shared memory, in groups of about one size."""
    limit = ARCHS[capabilities(device).arch].shared_limit - _STATIC_SHARED
    for most in range(min(_MOST_ROWS, rows), 0, -1):
        if shared_bytes(shape, pooling, most) <= limit:
            return block_count(rows, block_count(rows, most))
    raise Unsupported(
        f"{shape.keys} keys are {shape.key_blocks} key blocks, whose weights do not fit in this "
        f"GPU's shared memory ({limit} bytes): calibrate on a shorter sequence."
    )
