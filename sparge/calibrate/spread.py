# SPDX-License-Identifier: Apache-2.0
"""Places in a row, any few of which in succession are evenly spread."""

from __future__ import annotations

from math import gcd

GOLDEN = (5**0.5 - 1) / 2  # of its multiples, modulo 1, any number in a row is evenly spread


def spread_places(count: int, first: int, wanted: int) -> list[int]:
    """Numbers `first`, `first` + 1 ... of an endless visit of 0 .. count - 1: as many as `wanted`,
    none twice.

    Steps of about the golden ratio of all spread the places of any few visits evenly; a step
    coprime to their number comes to none twice before it came to all.
    """
    step = next(step for step in range(round(count * GOLDEN), 2 * count) if gcd(step, count) == 1)
    return [place * step % count for place in range(first, first + min(wanted, count))]
