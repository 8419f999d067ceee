# SPDX-License-Identifier: Apache-2.0
"""Places in a row, any few of which in succession are evenly spread, and rows of a query block."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ..plan.blocks import QUERY_BLOCK

#: Of so many rows of a query block one is compared: with two instead of four, measured heads of
#: DINOv2 video err by .0379 instead of .0381 at 20 %, clips of three small DiTs lie 0 to .2 dB
#: nearer to dense ones (clips 0-2, 10 to 50 %, H200, variants of a4052fb), samples of calibration
#: take up to 1.4 times as long. Probes likewise: at most .02 more heads are as expected, exact
#: attention of Wan's 40 heads takes .34 ms instead of .20.
ROW_STEP = 4
GOLDEN = (5**0.5 - 1) / 2  # of its multiples, modulo 1, any number in a row is evenly spread


def spread_places(count: int, first: int, wanted: int) -> list[int]:
    """Numbers `first`, `first` + 1 ... of an endless visit of 0 .. count - 1: as many as `wanted`,
    none twice.

    Steps of about the golden ratio of all spread the places of any few visits evenly; a step
    coprime to their number comes to none twice before it came to all.
    """
    step = next(step for step in range(round(count * GOLDEN), 2 * count) if gcd(step, count) == 1)
    return [place * step % count for place in range(first, first + min(wanted, count))]


def spread_rows(step: int) -> list[int]:
    """One of every `step` rows of a query block, a divisor of 128; in ascending order.

    Of every four in a row others than of the four before, and of the four of the next sixteen:
    cubes are about 4 x 4 x 4 tokens, and the same ones would be some of their columns or one of
    their diagonals. A head that looks to one side errs at one edge of its cubes: one of a small DiT
    by .063, of which every second row sees .028.
    """
    width = max(4, step)
    firsts = range(0, QUERY_BLOCK, step)
    return [first + (first // width + first // (4 * width)) % step for first in firsts]


def rows_on(device: torch.device, step: int) -> Tensor:
    """(rows,) int64: the same on a device, without waiting for it."""
    return torch.tensor(spread_rows(step), device="cpu").to(device, non_blocking=True)
