# SPDX-License-Identifier: Apache-2.0
"""Ways in which a head may be sparse, and the ranks of key blocks that each of them keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..blocks import whole_steps
from ..head_settings import Router


@dataclass(frozen=True)
class CandidateSet:
    """Every density with every pool weight; axes of errors are (densities, pool weights).

    Errors between the measured densities are interpolated. Pool weights cost little to measure:
    0.25 and 0.5 are for heads that full pooling ruins, 1.2 for those whose logits vary inside a
    block. Routing by mass is not offered (docs/experiments.md, Candidates).
    """

    densities: tuple[float, ...] = (0.03, 0.075, 0.15, 0.25, 0.4, 0.6, 1.0)
    """Ascending; the last is 1, so that every target can be met."""
    pool_weights: tuple[float, ...] = (0.0, 0.25, 0.5, 0.85, 1.0, 1.2)
    """Ascending from 0, plain dropping, which wins a tie."""
    router: Router = Router.ERROR
    output_scales: tuple[float, float] = (0.5, 2.0)
    """Least and greatest output scale that a head may get; both 1: no head gets one."""

    def __post_init__(self) -> None:
        if not _ascends(self.densities) or self.densities[0] <= 0 or self.densities[-1] != 1:
            raise ValueError(f"densities are {self.densities}; they ascend from above 0 to 1.")
        if len(self.densities) < 2:
            raise ValueError("densities hold nothing but 1, which drops nothing; give another.")
        if not _ascends(self.pool_weights) or self.pool_weights[0] != 0:
            raise ValueError(f"pool_weights are {self.pool_weights}; they ascend from 0.")

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.densities), len(self.pool_weights)

    def buckets(self, rank: Tensor, valid: Tensor) -> Tensor:
        """(..., nk) int64: for each block the first density that keeps it; -1 for invalid blocks.

        rank (..., nk) int: place among the ranked blocks, negative for forced ones; valid (..., nk)
        bool. Both as in `sparge.reference.Route`.
        """
        bucket = torch.zeros_like(rank)
        forced = (valid & (rank < 0)).sum(-1, keepdim=True)
        for asked in kept_ranks(self.densities, rank.shape[-1])[:-1]:
            bucket += rank >= whole_steps(torch.full_like(forced, asked), forced)
        return bucket.masked_fill(~valid, -1)


def kept_ranks(densities: Sequence[float], key_blocks: int) -> list[int]:
    """Ranked blocks that each density asks for, of `key_blocks`, at least one, in float32 as
    attention counts. Attention keeps as many more as make `whole_steps`."""
    shares = torch.tensor(densities, dtype=torch.float32, device="cpu")
    return (shares * key_blocks).long().clamp(min=1).tolist()


def _ascends(values: tuple[float, ...]) -> bool:
    return bool(values) and all(a < b for a, b in pairwise(values))
