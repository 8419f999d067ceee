# SPDX-License-Identifier: Apache-2.0
"""Buckets of key blocks that densities add one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Buckets:
    """Maps of every block and of none, (B, 1, S, words) int32."""

    every: Tensor
    """The last density keeps every block."""
    none: Tensor

    @classmethod
    def of(cls, every_block: Tensor, query_blocks: int) -> Buckets:
        """Makes them of `every_block` (B, words) int32, the key blocks that hold a key."""
        every = every_block.unsqueeze(1).expand(-1, query_blocks, -1)[:, None]
        return cls(every, torch.zeros_like(every))

    def between(self, kept: Tensor) -> Tensor:
        """(B, H, densities, S, words) int32: what each density adds to the one before, from the
        maps `kept` (B, H, densities - 1, S, words)."""
        heads = kept.shape[1]
        none, every = (x.expand(-1, heads, -1, -1).unsqueeze(2) for x in (self.none, self.every))
        return torch.cat([kept, every], 2) ^ torch.cat([none, kept], 2)
