# SPDX-License-Identifier: Apache-2.0
"""The buckets of key blocks that densities add one after the other, cut into pieces of about one
length, each of which one thread block attends to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..plan.blocks import WORD_BITS

#: Share of the key blocks in the longest piece of a bucket. A group of 5 heads is a tenth of a
#: millisecond of work, and a row of blocks that one SM walks alone must not take twice as long.
LONGEST_PIECE = 0.2


def piece_counts(densities: Sequence[float]) -> list[int]:
    """Into how many pieces the bucket of each density is cut."""
    widths = [after - before for before, after in pairwise((0.0, *densities))]
    return [math.ceil(width / LONGEST_PIECE - 1e-6) for width in widths]


@dataclass(frozen=True, eq=False)
class Pieces:
    counts: list[int]
    """Of each density's bucket."""
    bits: Tensor
    """(pieces, 1, 1) int32: those of its bucket's words that a piece has."""

    @classmethod
    def of(cls, densities: Sequence[float], device: torch.device) -> Pieces:
        counts = piece_counts(densities)
        bits = torch.full((sum(counts), 1, 1), -1, dtype=torch.int32, device=device)
        places = [(count, first) for count in counts for first in range(count)]
        for piece, (count, first) in zip(bits, places, strict=True):
            if count > 1:
                piece.fill_(every_bit(count, first))
        return cls(counts, bits)

    def cut(self, kept: Tensor, every: Tensor) -> Tensor:
        """What each density adds: (B, H, routers, pieces, S, words) int32 of the maps `kept`
        (B, H, routers, densities - 1, S, words) and of `every` block (B, words), which the last
        density keeps."""
        every = every[:, None, None, None, None].expand_as(kept[:, :, :, :1])
        bounds = torch.cat([kept, every], 3)
        added = bounds[:, :, :, 1:] ^ bounds[:, :, :, :-1]
        buckets = [kept[:, :, :, :1], *added.split(1, 3)]
        several = [
            bucket.expand(-1, -1, -1, count, -1, -1)
            for bucket, count in zip(buckets, self.counts, strict=True)
        ]
        return torch.cat(several, 3).bitwise_and_(self.bits)


def every_bit(count: int, first: int) -> int:
    """Every `count`-th bit of a map's word from `first` on, as int32."""
    bits = sum(1 << bit for bit in range(first, WORD_BITS, count))
    return bits - (bits >> (WORD_BITS - 1) << WORD_BITS)
