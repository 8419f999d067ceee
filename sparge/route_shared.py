# SPDX-License-Identifier: Apache-2.0
"""Shared memory of the route kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import Unsupported
from .kernels import capabilities
from .kernels.spec import ARCHS
from .workspace import CallShape

MAX_ROWS = 16  # query blocks that a thread block takes at most
STATIC_BYTES = 20736  # declared by the kernel itself, at head_dim 128
PADDING = 16  # numbers behind those of each product


@dataclass(frozen=True)
class RouteShared:
    """Shared memory that a launch asks for, beside what the kernel declares."""

    rows: int
    """Query blocks that share a thread block, and each read of the K means: as many as fit."""
    pitch: int
    """Distance, in numbers, from the scores of one query block to those of the next."""
    nbytes: int

    @classmethod
    def of(cls, shape: CallShape, with_pools: bool, device: torch.device) -> RouteShared:
        """Fits as many query blocks as shared memory holds. Raises Unsupported where not even the
        scores of one fit."""
        limit = ARCHS[capabilities(device).arch].shared_limit - STATIC_BYTES
        pitch = score_pitch(shape.key_blocks)
        numbers = 2 * pitch if with_pools else pitch  # room to score errors, beside the scores
        rows = min((limit - shape.key_blocks) // (4 * numbers), MAX_ROWS)
        if rows < 1:
            raise Unsupported(
                f"{shape.keys} keys are {shape.key_blocks} key blocks, whose scores do not fit in "
                f"this GPU's shared memory ({limit} bytes): split the sequence, or pass a "
                "block_mask."
            )
        scores = 4 * rows * pitch
        spare = max(scores, vector_bytes(shape.head_dim)) if with_pools else 0
        return cls(rows, pitch, scores + shape.key_blocks + spare)


def score_pitch(key_blocks: int) -> int:
    """Whole steps of sixteen key blocks (kKeyStep of csrc/route/outputs.cuh) plus eight numbers.

    So pairs of numbers in four rows lie in 32 banks, also where 512 key blocks (Wan's 32,760
    tokens) would put them in eight."""
    return (key_blocks + 15) // 16 * 16 + 8


def vector_bytes(head_dim: int) -> int:
    """Bytes of the vectors that every key block is multiplied with: one a query block.

    Each is in two parts, of four numbers a lane and eight channels."""
    return 2 * head_dim // 8 * (4 * 32 + PADDING) * 4
