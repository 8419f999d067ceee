# SPDX-License-Identifier: Apache-2.0
"""Cost of a density in a call: forced blocks, dense rows and the pooled keys count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from ..blocks import KEY_BLOCK, whole_steps
from ..order.grid import TokenOrder

#: Share of dense attention that pooled keys cost a head: one pseudo-key for 64 keys.
POOLED_COST = 1 / KEY_BLOCK


@dataclass(frozen=True)
class Workload:
    """Blocks of one call in which tokens attend to each other."""

    order: TokenOrder

    def of_kind(self, index: int, device: torch.device) -> Workload:
        """Workload with one token order alone, on `device`; copied there once for all orders."""
        return replace(self, order=self.order.on(device).of_kind(index))

    @property
    def key_blocks(self) -> int:
        return self.order.key_blocks

    def sparse_query_blocks(self) -> list[int]:
        """Query blocks whose queries may drop something, so those worth a measurement."""
        return (~self.order.queries_exact.cpu()).nonzero().flatten().tolist()

    def density(self, asked_ranks: Sequence[int]) -> NDArray[np.float64]:
        """(len(asked_ranks),): share of query-key pairs kept where a row asks for so many ranked
        blocks, in `whole_steps`.

        Where a row's ranked blocks differ in size, because a segment's last one is ragged, each
        counts as their mean.
        """
        always, forced_blocks, ranked_blocks, mean, total = self._rows
        kept = whole_steps(np.asarray(asked_ranks, np.int64)[:, None], forced_blocks)
        kept = np.minimum(ranked_blocks, kept)
        return (always + kept * mean).sum(1) / total

    @cached_property
    def _rows(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], int]:
        """(query blocks,) each: pairs that are always kept, their blocks, blocks that are ranked,
        pairs of one of these; and the number of all pairs. Kept, because the GPU waits for
        densities where heads are chosen."""
        pairs, forced = self._pairs(), self._forced()
        forced &= pairs > 0
        ranked = (pairs > 0) & ~forced
        blocks = ranked.sum(1)
        mean = (pairs * ranked).sum(1) / np.maximum(blocks, 1)
        return (pairs * forced).sum(1), forced.sum(1), blocks, mean, int(pairs.sum())

    def _pairs(self) -> NDArray[np.int64]:
        """(query blocks, key blocks): query-key pairs of each block."""
        queries, keys = self.order.query_counts().cpu(), self.order.block_counts.cpu()
        return torch.outer(queries.long(), keys.long()).numpy()

    def _forced(self) -> NDArray[np.bool_]:
        """(query blocks, key blocks): whether a block is kept whatever the density."""
        return (self.order.queries_exact.cpu().unsqueeze(1) | self.order.keys_exact.cpu()).numpy()
