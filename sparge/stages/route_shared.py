# SPDX-License-Identifier: Apache-2.0
"""Dynamic shared memory of the route kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..blocks import block_count
from ..errors import Unsupported
from .workspace import CallShape


@dataclass(frozen=True)
class RouteShared:
    """Request of one launch."""

    rows: int
    """Query blocks that share a thread block, and each read of the K means: as many as fit."""
    pitch: int
    """Distance, in numbers, from the scores of one query block to those of the next."""
    nbytes: int

    @classmethod
    def of(cls, shape: CallShape, with_pools: bool, sizes: Any, limit: int) -> RouteShared:
        """sizes: `RouteSizes` of the kernel. limit: bytes that a launch may ask for.

        Raises Unsupported where not even the scores of one query block fit.
        """
        pitch = score_pitch(shape.key_blocks, sizes)
        numbers = 2 * pitch if with_pools else pitch  # room to score errors, beside the scores
        rows = min((limit - shape.key_blocks) // (4 * numbers), sizes.rows)
        if rows < 1:
            raise Unsupported(
                f"{shape.keys} keys are {shape.key_blocks} key blocks, whose scores do not fit in "
                f"this GPU's shared memory ({limit} bytes): split the sequence, or pass a "
                "block_mask.",
                "large",
            )
        scores = 4 * rows * pitch
        spare = max(scores, sizes.spare_bytes) if with_pools else 0
        return cls(rows, pitch, scores + shape.key_blocks + spare)


def score_pitch(key_blocks: int, sizes: Any) -> int:
    """Whole steps of key blocks and eight numbers, so that pairs of numbers in four rows lie in 32
    banks. Of 512 key blocks, the 32,760 tokens of Wan, they would all lie in eight."""
    return block_count(key_blocks, sizes.key_step) * sizes.key_step + 8
