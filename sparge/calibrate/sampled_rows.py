# SPDX-License-Identifier: Apache-2.0
"""What a sample on the GPU knows before it touches keys: its query rows, and the blocks they may
drop. The same for all groups of heads, so made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..plan.blocks import QUERY_BLOCK, pack
from ..plan.grid import EMPTY, TokenOrder
from ..policy import PV_FILTER_OFF
from ..thresholds import SELECTION, threshold_table
from .candidates import CandidateSet
from .measure import Sample


@dataclass(frozen=True, eq=False)
class SampledRows:
    tokens: Tensor
    """(H, S x 128) int64: of each head the tokens in the sampled query blocks of its walk, any in
    empty slots."""
    occupied: Tensor
    """(S, 128) bool, in every walk."""
    every_block: Tensor
    """(B, words) int32: the key blocks that hold a key, packed."""
    log_counts: Tensor
    """(B, nk) float32: log2 of the keys, -inf for a block that is never dropped."""
    thresholds: Tensor
    """(routers x (densities - 1), 5) float32: what routes as each candidate, see `HeadThresholds`."""

    @classmethod
    def of(cls, sample: Sample, order: TokenOrder) -> SampledRows:
        """On the device of the sample; never waits for it."""
        batch, heads = sample.q.shape[:2]
        tokens = _tokens(order, sample.query_blocks)
        by_head = tokens[:1].expand(heads, -1, -1)
        if sample.walk is not None:
            by_head = tokens.index_select(0, sample.walk)
        counts = order.key_counts(sample.key_lengths, batch)
        never_dropped = (counts == 0) | order.keys_exact
        if sample.workload.sink:
            never_dropped[:, 0] = True
        return cls(
            by_head.flatten(1).clamp(min=0).long(),
            tokens[0] != EMPTY,
            pack(counts > 0),
            counts.log2().masked_fill_(never_dropped, -torch.inf),
            _thresholds(sample.candidates, sample.q.device),
        )

    def of_heads(self, q: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Rows (B, heads, S x 128, D) of q (B, heads, N, D), 0 in empty slots, and the means
        (B, heads, S, D) float32 of their blocks."""
        batch, _, _, channels = q.shape
        tokens = self.tokens[heads].unsqueeze(-1).expand(batch, -1, -1, channels)
        rows = q.gather(2, tokens).masked_fill_(~self.occupied.view(-1, 1), 0)
        sums = rows.unflatten(2, self.occupied.shape).sum(3, dtype=torch.float32)
        return rows, sums.div_(self.occupied.sum(1, keepdim=True))


def _tokens(order: TokenOrder, blocks: Sequence[int]) -> Tensor:
    """(walks, S, 128) int32, -1 in empty slots. Selected one by one: an index tensor would come
    from the host and wait."""
    slots = pad(order.slot_tokens, (0, -order.slots % QUERY_BLOCK), value=EMPTY)
    by_block = slots.unflatten(1, (-1, QUERY_BLOCK))
    return torch.stack([by_block[:, block] for block in blocks], 1)


def _thresholds(candidates: CandidateSet, device: torch.device) -> Tensor:
    tables = [
        threshold_table(
            len(candidates.densities) - 1,
            device,
            selection=1.0,
            simthreshd1=-torch.inf,
            pvthreshd=PV_FILTER_OFF,
            log2_gain=-torch.inf,
            router=float(router),
        )
        for router in candidates.routers
    ]
    for table in tables:
        for place, density in enumerate(candidates.densities[:-1]):
            table[place, SELECTION].fill_(density)
    return torch.cat(tables)
