# SPDX-License-Identifier: Apache-2.0
"""Pieces of about one length of the buckets of key blocks that densities add one after the other.

One thread block attends to each piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..blocks import WORD_BITS

#: Share of the key blocks in the longest piece of a bucket. No multiprocessor may work alone for
#: long (docs/experiments.md, Length of a piece).
LONGEST_PIECE = 0.1
#: Bits in `ScoreParams.ends`.
MOST_PIECES = 32


def piece_counts(densities: Sequence[float]) -> list[int]:
    """Number of pieces that the bucket of each density is cut into: odd for all but the last."""
    widths = [after - before for before, after in pairwise((0.0, *densities))]
    *counts, last = (math.ceil(width / LONGEST_PIECE - 1e-6) for width in widths)
    return [*(count | 1 for count in counts), last]


@dataclass(frozen=True, eq=False)
class Pieces:
    ends: int
    """Word with a bit for each piece that is the last of its density's bucket."""
    counts: list[int]
    """Number of pieces of each density's bucket."""
    bits: Tensor
    """(pieces, 1) int32: the bits of its bucket's words that a piece has."""
    every: Tensor
    """(B, 1, 1, S x words) int32: the map of every block, which the last density keeps."""
    none: Tensor
    """Map of no block, of the same shape."""

    @classmethod
    def of(cls, densities: Sequence[float], every_block: Tensor, query_blocks: int) -> Pieces:
        """Makes pieces for `every_block` (B, words) int32."""
        counts = piece_counts(densities)
        if sum(counts) > MOST_PIECES:
            raise ValueError(f"{len(densities)} densities are more than kernels score at once.")
        masks = [every_bit(count, first) for count in counts for first in range(count)]
        bits = torch.tensor(masks, dtype=torch.int32, device="cpu").view(-1, 1)
        bits = bits.to(every_block.device, non_blocking=True)
        every = every_block.repeat(1, query_blocks)[:, None, None]
        return cls(
            sum(1 << end - 1 for end in accumulate(counts)),
            counts,
            bits,
            every,
            torch.zeros_like(every),
        )

    def cut(self, kept: Tensor) -> Tensor:
        """Cuts what each density adds: (B, H, pieces, S, words) int32 of the maps `kept` (B, H,
        densities - 1, S, words).

        A bucket is where two maps differ, whichever comes first. So maps in a row, back and forth
        between those of a bucket in several pieces, differ from their neighbours by all pieces.
        """
        batch, heads, _, blocks, words = kept.shape
        flat = kept.flatten(3).flatten(0, 1)  # of more than four dimensions cat copies one by one

        def for_heads(one: Tensor) -> Tensor:
            return one.expand(-1, heads, -1, -1).flatten(0, 1)

        maps = [for_heads(self.none), *flat.split(1, 1), for_heads(self.every)]
        bounds = maps[:1]
        for pair, count in zip(pairwise(maps), self.counts, strict=True):
            bounds += [pair[1 - piece % 2] for piece in range(count)]
        row = torch.cat(bounds, 1)
        pieces = (row[:, 1:] ^ row[:, :-1]).bitwise_and_(self.bits)
        return pieces.view(batch, heads, -1, blocks, words)


def every_bit(count: int, first: int) -> int:
    """Every `count`-th bit of a map's word from `first` on, as int32."""
    bits = sum(1 << bit for bit in range(first, WORD_BITS, count))
    return bits - (bits >> (WORD_BITS - 1) << WORD_BITS)
