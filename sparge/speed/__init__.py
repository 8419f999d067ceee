# SPDX-License-Identifier: Apache-2.0
"""Speed table of this GPU: what an attention call takes exact, 8-bit dense and sparse."""

from .backend import TORCH, Backend
from .kept import known_table, speed_table
from .measuring_cost import MeasuringCost
from .one_shape import ShapeTimes, time_shape
from .table import Cost, Size, SpeedTable, Times

__all__ = [
    "TORCH",
    "Backend",
    "Cost",
    "MeasuringCost",
    "ShapeTimes",
    "Size",
    "SpeedTable",
    "Times",
    "known_table",
    "speed_table",
    "time_shape",
]
