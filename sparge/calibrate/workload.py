# SPDX-License-Identifier: Apache-2.0
"""What a density costs in a call: forced blocks, dense rows, the floor and the residual count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..plan.blocks import KEY_BLOCK, QUERY_BLOCK
from ..plan.grid import TokenOrder, raster_order

#: One pseudo-key for 64 keys: a head that pools works this share of dense attention on top.
RESIDUAL_COST = 1 / KEY_BLOCK


@dataclass(frozen=True)
class Workload:
    """The blocks of one call in which tokens attend to each other."""

    order: TokenOrder
    is_causal: bool = False

    @classmethod
    def of_tokens(cls, tokens: int, is_causal: bool = False) -> Workload:
        """Tokens in the order they come."""
        return cls(raster_order(tokens), is_causal)

    @property
    def key_blocks(self) -> int:
        return self.order.key_blocks

    def sparse_query_blocks(self) -> list[int]:
        """Those whose queries may drop something, so those worth a sample."""
        return (~self.order.queries_exact.cpu()).nonzero().flatten().tolist()

    def density(self, kept_ranks: Sequence[int]) -> NDArray[np.float64]:
        """(len(kept_ranks),): share of the blocks that are kept with so many ranked ones a row."""
        valid = np.full(self.order.query_blocks, self.key_blocks)
        forced = np.full_like(valid, int(self.order.keys_exact.sum()))
        if self.is_causal:
            first_row = np.arange(self.order.query_blocks) * QUERY_BLOCK
            last_row = np.minimum(first_row + QUERY_BLOCK, self.order.tokens) - 1
            valid = np.minimum(last_row // KEY_BLOCK + 1, self.key_blocks)
            forced = valid - first_row // KEY_BLOCK  # those on the diagonal
        forced = np.where(self.order.queries_exact.cpu().numpy(), valid, forced)
        rows = self.order.query_counts().cpu().numpy().astype(np.float64)
        kept = np.minimum(forced + np.asarray(kept_ranks)[:, None], valid)
        return (kept * rows).sum(1) / (valid * rows).sum()
