# SPDX-License-Identifier: Apache-2.0
"""Orders of tokens by which query blocks and key blocks are cut."""

from .grid import (
    Segment,
    TokenGrid,
    TokenOrder,
    cube_order,
    grid_order,
    raster_order,
    unmeasured_order,
)
from .variants import OrderKind

__all__ = [
    "OrderKind",
    "Segment",
    "TokenGrid",
    "TokenOrder",
    "cube_order",
    "grid_order",
    "raster_order",
    "unmeasured_order",
]
