# SPDX-License-Identifier: Apache-2.0
"""Candidates of a head: token order x pool weight x density, what each keeps and costs.

Errors are measured at a few densities and read off between them, at many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, whole_steps
from ..order.grid import TokenOrder

#: Densities whose errors are measured. The last keeps all, so that every target can be met.
MEASURED = (0.03, 0.075, 0.15, 0.25, 0.4, 0.6, 1.0)
#: Weights of the mean key that stands for a dropped block; 0 is plain dropping. 0.25 and 0.5 are
#: for heads that full pooling ruins, 1.2 for those whose logits vary inside a block.
POOL_WEIGHTS = (0.0, 0.25, 0.5, 0.85, 1.0, 1.2)
#: Ratio of a density that a head may get to the one before: steps of 0.002 at 3 %, 0.015 at 20 %.
RATIO = 1.08
#: Share of dense attention that pooled keys cost a head: one for 64 keys.
POOLED_COST = 1 / KEY_BLOCK
LEAST_ERROR = 1e-6  # keeps the logarithm of an error of 0 a number, far below the 8-bit error


@dataclass(frozen=True, eq=False)
class Candidates:
    """Candidates of the heads that attend in one token order or one of several. Tensors are on one
    device, float64 unless they say otherwise."""

    orders: int
    """Number of token orders that a head may take."""
    asked: Tensor
    """(densities,) float32, ascending: densities as `HeadSettings` takes them."""
    kept: Tensor
    """(densities,): shares of query-key pairs that they keep, forced blocks included."""
    below: Tensor
    """(densities,) int64: the measured density below each of them."""
    share: Tensor
    """(densities,): how much of the way from that one to the next lies before it."""
    measured: tuple[float, ...]
    """Measured densities, as a `threshold_table` takes them; the last is 1."""

    @classmethod
    def of(cls, order: TokenOrder, device: torch.device, shares_keys: bool = False) -> Candidates:
        """Candidates of calls in these token orders. shares_keys: several heads read the same keys
        (GQA), which have to share an order, so that the first alone is offered."""
        blocks = order.key_blocks
        between, density = [MEASURED[0]], MEASURED[0]
        while (density := density * RATIO) < 1:
            between.append(density)
        ranks, fine = _ranks(MEASURED, blocks), _ranks([*between, 1.0], blocks)
        rank_of = dict(zip(kept_shares(order, fine), fine, strict=True))
        known = torch.tensor(kept_shares(order, ranks), dtype=torch.float64, device="cpu")
        kept = torch.tensor(sorted(rank_of), dtype=torch.float64, device="cpu")
        below = (torch.searchsorted(known, kept, right=True) - 1).clamp(max=len(known) - 2)
        gap = known[below + 1] - known[below]
        share = torch.where(gap > 0, (kept - known[below]) / gap.where(gap > 0, 1.0), 1.0)
        asked = [_asking(rank_of[each], blocks) for each in sorted(rank_of)]
        return cls(
            1 if shares_keys else order.order_kinds,
            torch.tensor(asked, dtype=torch.float32, device="cpu").to(device),
            kept.to(device),
            below.to(device),
            share.to(device),
            tuple(_asking(rank, blocks) for rank in ranks),
        )

    @property
    def least(self) -> float:
        """Share of pairs that is kept whatever is chosen. Waits for the device."""
        return float(self.kept[0])

    def costs(self) -> Tensor:
        """(2, densities): shares of dense attention that heads take, not pooling and pooling."""
        return torch.stack([self.kept, self.kept + POOLED_COST * (self.kept < 1)])

    def errors_between(self, measured: Tensor) -> Tensor:
        """(..., densities) errors from those of the measured densities. They fall about
        exponentially, so that their logarithm is read linearly; in the last stretch, which ends at
        0, the error itself."""
        low, high = measured[..., self.below], measured[..., self.below + 1]
        log_low, log_high = (x.clamp(min=LEAST_ERROR).log() for x in (low, high))
        curve = _line(log_low, log_high, self.share).exp()
        is_last = self.below == measured.shape[-1] - 2
        found = torch.where(is_last, _line(low, high, self.share), curve)
        return torch.where(self.kept < 1, found, 0.0)

    def between(self, measured: Tensor) -> Tensor:
        """(..., densities) values read linearly from those of the measured densities."""
        return _line(measured[..., self.below], measured[..., self.below + 1], self.share)


def _line(low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    return low + share * (high - low)


def _ranks(densities: Sequence[float], blocks: int) -> list[int]:
    """Ranked blocks that each density asks for, at least one."""
    return [max(1, int(density * blocks + 1e-9)) for density in densities]


def _asking(rank: int, blocks: int) -> float:
    """Density that asks for so many ranked blocks: half a block more, for rounding to float32."""
    return min(1.0, (rank + 0.5) / blocks)


def kept_shares(order: TokenOrder, ranks: Sequence[int]) -> list[float]:
    """Shares of pairs that query blocks keep which ask for so many ranked blocks, in `whole_steps`.
    Where a query block's ranked blocks differ in size each counts as their mean."""
    pairs = torch.outer(order.query_counts().cpu().double(), order.block_counts.cpu().double())
    ranked = ~(order.queries_exact.cpu().unsqueeze(1) | order.keys_exact.cpu())
    blocks, forced, of_ranked = ranked.sum(1), (~ranked).sum(1), (pairs * ranked).sum(1)
    always, mean = (pairs.sum(1) - of_ranked).sum(), of_ranked / blocks.clamp(min=1)
    taken = [whole_steps(torch.full_like(blocks, rank), forced).minimum(blocks) for rank in ranks]
    return [float((always + (mean * each).sum()) / pairs.sum()) for each in taken]
