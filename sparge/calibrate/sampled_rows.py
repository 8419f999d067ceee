# SPDX-License-Identifier: Apache-2.0
"""What a sample on the GPU knows before it touches keys: its query rows, and the blocks they may
drop. Made once for all groups of heads."""

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
    q: Tensor
    """(B, H, S x 128, D): the sampled query blocks, of each head in its walk; 0 in empty slots."""
    means: Tensor
    """(B, H, S, D) float32: of the queries of each block."""
    occupied: Tensor
    """(S, 128) bool, in every walk."""
    every_block: Tensor
    """(B, words) int32: the key blocks that hold a key, packed."""
    log_counts: Tensor
    """(B, nk) float32: log2 of the keys, -inf for a block that is never dropped."""
    thresholds: Tensor
    """(routers x (densities - 1), 5) float32: `HeadThresholds` that route as each candidate."""

    @classmethod
    def of(cls, sample: Sample, order: TokenOrder) -> SampledRows:
        """On the device of the sample; never waits for it."""
        batch, heads, _, channels = sample.q.shape
        tokens = _tokens(order, sample.query_blocks)
        occupied = tokens[0] != EMPTY
        by_head = tokens[:1].expand(heads, -1, -1)
        if sample.walk is not None:
            by_head = tokens.index_select(0, sample.walk)
        places = by_head.flatten(1).clamp(min=0).long().unsqueeze(-1)
        q = sample.q.gather(2, places.expand(batch, -1, -1, channels))
        q.masked_fill_(~occupied.view(-1, 1), 0)
        sums = q.unflatten(2, occupied.shape).sum(3, dtype=torch.float32)
        counts = order.key_counts(sample.key_lengths, batch)
        never_dropped = (counts == 0) | order.keys_exact
        if sample.workload.sink:
            never_dropped[:, 0] = True
        return cls(
            q,
            sums.div_(occupied.sum(1, keepdim=True)),
            occupied,
            pack(counts > 0),
            counts.log2().masked_fill_(never_dropped, -torch.inf),
            _thresholds(sample.candidates, sample.q.device),
        )


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
