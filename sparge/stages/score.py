# SPDX-License-Identifier: Apache-2.0
"""Launch of the kernel that scores the candidates of measured heads."""

from __future__ import annotations

from torch import Tensor

from ..blocks import block_count
from ..errors import Unsupported
from ..kernels import Element
from ..kernels.params import ScoreParams, ScoreSizes
from .launch import fields_of, find_kernel, queue, shared_room, view_of
from .workspace import CallShape, layout_of

MOST_DENSITIES = 32  # a lane of a warp each; kMostDensities of csrc/score/place.cuh


def score(
    exact: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    workspace: Tensor,
    shape: CallShape,
    element: Element,
    kept: Tensor,
    scale: float,
    found: Tensor,
) -> None:
    """Writes ``found``; shapes as in ``csrc/params.cuh``, of ``q`` in any strides but a contiguous
    last dimension.

    exact: sums, maxima and sums of weights, as in partial results. shape, element: of the call that
    quantized into ``workspace``. Raises Unsupported for more densities or keys than a thread block
    has room for.
    """
    exact_out, exact_max, exact_sum = exact
    batch, heads, densities, rows, channels = exact_out.shape
    if densities > MOST_DENSITIES:
        raise Unsupported(
            f"The candidates have {densities} densities; up to {MOST_DENSITIES} are measured at "
            "once: give fewer."
        )
    blocks = kept.shape[3]
    field_stride, batch_stride, head_stride, _ = found.stride()
    layout = layout_of(shape, element, False, True)
    rows_a_block = rows // blocks
    device = exact_out.device
    kernel = find_kernel("score", device, shape.head_dim)
    room = shared_room(kernel, device)
    rows_per_cta = _rows_per_cta(shape, densities - 1, rows_a_block, kernel.sizes, room)
    params = ScoreParams(
        exact_out=exact_out.data_ptr(),
        exact_max=exact_max.data_ptr(),
        exact_sum=exact_sum.data_ptr(),
        q=view_of(q),
        kept=kept.data_ptr(),
        found=found.data_ptr(),
        field_stride=field_stride,
        batch_stride=batch_stride,
        head_stride=head_stride,
        scale=scale,
        heads=heads,
        kv_heads=shape.kv_heads,
        densities=densities,
        blocks=blocks,
        rows=rows,
        channels=channels,
        key_blocks=shape.key_blocks,
        room=_places(shape.key_blocks, densities - 1, kernel.sizes),
        rows_per_cta=rows_per_cta,
        **fields_of(ScoreParams, layout, workspace),
    )
    groups = block_count(rows_a_block, rows_per_cta)
    grid = (batch * heads * blocks * groups, 1, 1)
    shared = shared_bytes(shape, densities - 1, rows_per_cta, kernel.sizes)
    queue(kernel, grid, params, shared)


def shared_bytes(shape: CallShape, pooling: int, rows: int, sizes: ScoreSizes) -> int:
    """Dynamic shared memory of a thread block of so many rows; ``Shared`` of csrc/score/place.cuh.

    pooling: densities that drop something.
    """
    places = _places(shape.key_blocks, pooling, sizes)
    weights = min(rows, 2) * block_count(rows, 2) * (block_count(places, 16) * 16 + 8)
    pooled = 4 * pooling * rows * shape.head_dim
    return max(sizes.query_bytes, pooled) + 4 * (weights + places) + 2 * places


def _places(key_blocks: int, pooling: int, sizes: ScoreSizes) -> int:
    """In the list of dropped key blocks, with what fills up the bucket of each density."""
    return key_blocks + pooling * (sizes.step - 1)


def _rows_per_cta(shape: CallShape, pooling: int, rows: int, sizes: ScoreSizes, limit: int) -> int:
    """Rows of a query block that fit in shared memory, in groups of about one size."""
    for most in range(min(sizes.rows, rows), 0, -1):
        if shared_bytes(shape, pooling, most, sizes) <= limit:
            return block_count(rows, block_count(rows, most))
    raise Unsupported(
        f"{shape.keys} keys are {shape.key_blocks} key blocks, whose weights do not fit in this "
        f"GPU's shared memory ({limit} bytes): measure on a shorter sequence."
    )
