# SPDX-License-Identifier: Apache-2.0
"""Block maps of the layers that somebody asked for, those of their last sparse calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, block_count, unpack
from ..order.grid import TokenOrder
from ..stats import AttentionStats
from .call import Call
from .facts import PassFacts
from .head_measuring import Untracked
from .head_table import COND


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """Block maps of the heads of a layer in one sparse call."""

    step: int
    """Number of the sampling step, from 0."""
    packed: Tensor
    """(heads, query blocks, words) int32, as `sparge.blocks.pack` lays it out."""
    key_blocks: int

    @property
    def heads(self) -> int:
        return len(self.packed)

    def of_head(self, head: int) -> Tensor:
        """(query blocks, key blocks) bool: blocks that were computed. Both are counted in the token
        order of the head."""
        return unpack(self.packed[head], self.key_blocks)


class BlockMaps:
    """Block maps of one run, on its devices until they are fetched."""

    def __init__(self, layers: Collection[int], untracked: Untracked) -> None:
        """untracked: as in `Session`."""
        self.layers, self._untracked = frozenset(layers), untracked
        self._found: dict[int, LayerMaps] = {}

    @contextmanager
    def of_call(
        self,
        layer: int,
        call: Call,
        order: TokenOrder | None,
        facts: PassFacts,
        stats: AttentionStats,
    ) -> Iterator[None]:
        """Context around a sparse call of one of `layers`: takes the maps of the positive prompt.
        Never waits."""
        if COND not in facts.conditioning or facts.which:
            yield
            return
        stats.block_maps = maps = []
        try:
            yield
        finally:
            stats.block_maps = None
        entry = facts.conditioning.index(COND) * (len(call.q) // len(facts.conditioning))
        key_blocks = block_count(call.k.shape[2], KEY_BLOCK) if order is None else order.key_blocks
        # What is made here outlives the call, whose result is there: it is worth more than a map.
        with suppress(torch.OutOfMemoryError), self._untracked():
            packed = torch.cat([part[entry] for part in maps])
            self._found[layer] = LayerMaps(facts.step, packed, key_blocks)

    def fetched(self) -> dict[int, LayerMaps]:
        """Maps by layer, on the CPU. Waits for the devices."""
        return {
            layer: LayerMaps(maps.step, maps.packed.cpu(), maps.key_blocks)
            for layer, maps in sorted(self._found.items())
        }
