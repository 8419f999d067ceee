# SPDX-License-Identifier: Apache-2.0
"""Places in a row, any few of which in succession are evenly spread, and rows of a query block."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ..blocks import QUERY_BLOCK

#: One in so many rows of a query block is compared (docs/experiments.md, Rows of a query block).
ROW_STEP = 4
GOLDEN = (5**0.5 - 1) / 2  # any number of its multiples in a row, modulo 1, is evenly spread


def spread_places(count: int, first: int, wanted: int) -> list[int]:
    """Numbers `first`, `first` + 1 ... of an endless visit of 0 .. count - 1: as many as `wanted`,
    none twice.

    Steps of about the golden ratio of `count` spread the places of any few visits evenly. A step
    coprime to `count` comes to none twice before it came to all.
    """
    step = next(step for step in range(round(count * GOLDEN), 2 * count) if gcd(step, count) == 1)
    return [place * step % count for place in range(first, first + min(wanted, count))]


def spread_rows(step: int) -> list[int]:
    """One of every `step` rows of a query block, in ascending order; `step` divides 128.

    Every four in a row give other rows than the four before, and the next sixteen than their fours.
    Cubes are about 4 x 4 x 4 tokens, and the same rows would be some of their columns or one of
    their diagonals, where heads that look to one side do not err.
    """
    width = max(4, step)
    firsts = range(0, QUERY_BLOCK, step)
    return [first + (first // width + first // (4 * width)) % step for first in firsts]


def rows_on(device: torch.device, step: int) -> Tensor:
    """(rows,) int64 rows of `spread_rows` on a device, without waiting for it."""
    return torch.tensor(spread_rows(step), device="cpu").to(device, non_blocking=True)
