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
        order = self.order
        pairs = torch.outer(order.query_counts().cpu().long(), order.block_counts.cpu().long())
        ranked = ~(order.queries_exact.cpu().unsqueeze(1) | order.keys_exact.cpu())
        of_blocks, is_ranked = pairs.numpy(), ranked.numpy()
        blocks, of_ranked = is_ranked.sum(1), (of_blocks * is_ranked).sum(1)
        always, mean = of_blocks.sum(1) - of_ranked, of_ranked / np.maximum(blocks, 1)
        return always, (~is_ranked).sum(1), blocks, mean, int(of_blocks.sum())
