# SPDX-License-Identifier: Apache-2.0
"""Plans: which key blocks each query block attends to."""

from .blocks import KEY_BLOCK, QUERY_BLOCK, BlockPlan, block_count, block_pairs, pack, unpack
from .budget import HeadBudget, Router
from .grid import (
    Segment,
    TokenGrid,
    TokenOrder,
    cube_order,
    grid_order,
    raster_order,
    unmeasured_order,
)
from .walks import Walk

__all__ = [
    "KEY_BLOCK",
    "QUERY_BLOCK",
    "BlockPlan",
    "HeadBudget",
    "Router",
    "Segment",
    "TokenGrid",
    "TokenOrder",
    "Walk",
    "block_count",
    "block_pairs",
    "cube_order",
    "grid_order",
    "pack",
    "raster_order",
    "unmeasured_order",
    "unpack",
]
