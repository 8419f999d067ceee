# SPDX-License-Identifier: Apache-2.0
"""The thresholds of all heads in one tensor, as route and attend read them."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.params import HeadThresholds

COLUMNS = tuple(field[0] for field in HeadThresholds._fields_)
SELECTION = COLUMNS.index("selection")


def threshold_table(heads: int, device: torch.device, **columns: float | Tensor) -> Tensor:
    """(heads, 5) float32; a number or a (heads,) tensor for each field of `HeadThresholds`."""
    table = torch.empty(heads, len(COLUMNS), dtype=torch.float32, device=device)
    for index, name in enumerate(COLUMNS):
        value = columns[name]
        if isinstance(value, Tensor):
            table[:, index].copy_(value, non_blocking=True)
        else:
            table[:, index].fill_(value)
    return table
