# SPDX-License-Identifier: Apache-2.0
"""Share of key blocks to ask for where so many are to be kept."""

from __future__ import annotations


def share_of(count: int, blocks: int) -> float:
    """Share for `count` of `blocks`. Routing keeps int(share * blocks); half a block more keeps
    float32 from rounding below."""
    return min(1.0, (count + 0.5) / blocks)
