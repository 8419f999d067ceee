# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a transformer of diffusers: numbers its attention calls by block."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ...sampling import Dense, Kind, Layer, ServedPass
from ...sampling.layout import UNNUMBERED
from .call import SdpaCall


@dataclass(kw_only=True)
class Forward(ServedPass):
    """One forward pass; its hooks say which block runs."""

    _of_block: dict[int, int] = field(default_factory=dict, repr=False)
    """Number of the clip's self-attention calls of each block so far."""

    def attend(self, given: SdpaCall, block: int | None, dense: Dense) -> Tensor:
        """Result of a call, sparse when nothing speaks against it, else from dense(). block: number
        of the running one, None outside of all."""
        if self.handing_on:
            return dense()
        facts, numbered = given.facts, bool(self.layout.blocks)
        if numbered and block is None and facts.query_tokens < self.layout.frame_tokens:
            return dense()  # of text alone, before the blocks
        kind = facts.kind(self.layout, self.run.settings)
        if not numbered:  # then calls are counted
            block = self._of_block.get(UNNUMBERED, 0)
        counts = kind is not Kind.CROSS and facts.query_tokens >= self.layout.grid_tokens
        layer = self._layer(block, counts)
        return self.serve(given, kind, layer, dense)

    def _layer(self, block: int | None, counts: bool) -> Layer:
        """Layer of a call. counts: it is of the clip."""
        if block is None:
            return Layer(UNNUMBERED, self.layout.rows, beside=True)
        place = block if self.layout.blocks else UNNUMBERED
        earlier = self._of_block.get(place, 0)
        if not counts:
            return Layer(block, self.layout.row(block, earlier), beside=True)
        self._of_block[place] = earlier + 1
        return Layer(block, self.layout.row(block, earlier if self.layout.blocks else 0))
