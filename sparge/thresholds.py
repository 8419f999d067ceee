# SPDX-License-Identifier: Apache-2.0
"""Table of the thresholds of all heads in one tensor, as route and attend read them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kernels.params import HeadThresholds

COLUMNS = tuple(field[0] for field in HeadThresholds._fields_)
OFF = {"log2_pool_weight": -math.inf, "router": 0.0, "output_scale": 1.0}
SELECTION = COLUMNS.index("selection")


def threshold_table(heads: int, device: torch.device, **columns: float | Tensor) -> Tensor:
    """(heads, fields) float32; a number or a (heads,) tensor for each field of `HeadThresholds`.

    Substitutes for dropped blocks, and ranking by error, are `OFF` where they are not given.
    """
    assert columns.keys() <= set(COLUMNS), columns.keys()
    table = torch.empty(heads, len(COLUMNS), dtype=torch.float32, device=device)
    for index, name in enumerate(COLUMNS):
        value = columns[name] if name in columns else OFF[name]
        if isinstance(value, Tensor):
            check_per_head(name, value, heads)
            table[:, index].copy_(value, non_blocking=True)
        else:
            table[:, index].fill_(value)
    return table


def check_per_head(name: str, value: float | Tensor, heads: int) -> None:
    if isinstance(value, Tensor) and value.shape not in ((), (heads,)):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; give one number or one value for each of the "
            f"{heads} query heads."
        )
