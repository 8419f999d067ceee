# SPDX-License-Identifier: Apache-2.0
"""Which key blocks each query block attends to."""

from .blocks import KEY_BLOCK, QUERY_BLOCK, BlockPlan, block_count, block_pairs, pack, unpack
from .budget import HeadBudget, Router
from .grid import Segment, TokenGrid, TokenOrder, cube_order, raster_order

__all__ = [
    "KEY_BLOCK",
    "QUERY_BLOCK",
    "BlockPlan",
    "HeadBudget",
    "Router",
    "Segment",
    "TokenGrid",
    "TokenOrder",
    "block_count",
    "block_pairs",
    "cube_order",
    "pack",
    "raster_order",
    "unpack",
]
