# SPDX-License-Identifier: Apache-2.0
"""Calls with head settings to time: made up, for their values have no part in the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparge
from sparge import HeadSettings, Router, SparsePolicy, TokenGrid, TokenOrder
from sparge.session.measure import kept_shares


def share_of(count: int, blocks: int) -> float:
    """Share for `count` of `blocks`. Routing keeps int(share * blocks); half a block more keeps
    float32 from rounding below."""
    return min(1.0, (count + 0.5) / blocks)


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    policy: SparsePolicy
    order: TokenOrder | None = None
    head_settings: HeadSettings | None = None

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], **options: Any) -> Tensor:
        return sparge.attention(
            *qkv, self.policy, order=self.order, head_settings=self.head_settings, **options
        )


def ranked_share(order: TokenOrder, density: float) -> float:
    """Share of all key blocks that a query block ranks in where a call keeps `density` of its
    pairs, as nearly as whole steps can. Text, which is exact, is part of what is kept, as in auto
    budget."""
    kept = np.array(kept_shares(order, range(1, order.key_blocks + 1)))
    nearest = kept[np.abs(kept - density).argmin()]
    asked = 1 + int(np.flatnonzero(kept == nearest)[-1])  # makes whole steps in raster order, too
    return share_of(asked, order.key_blocks)


def half_pooled(
    name: str, grid: TokenGrid, heads: int, density: float, device: torch.device | str
) -> Case:
    """Case in cube order in which every second head pools what it drops and ranks by error."""
    order, density = _ordered(grid, density, device)
    uniform = torch.full((heads,), density, device=device)
    return Case(name, SparsePolicy(topk=density), order, HeadSettings(uniform, *_halves(uniform)))


def spread(
    name: str, grid: TokenGrid, heads: int, density: float, device: torch.device | str
) -> Case:
    """Case as `half_pooled`, with densities spread tenfold between heads that take all orders."""
    order, density = _ordered(grid, density, device)
    spread = torch.logspace(-0.5, 0.5, heads, device=device)
    spread = (spread / spread.mean() * density).clamp(max=1)
    order_kind = (torch.arange(heads, device=device) % order.order_kinds).int()
    head_settings = HeadSettings(spread, *_halves(spread), order_kind=order_kind)
    return Case(name, SparsePolicy(topk=density), order, head_settings)


def _ordered(
    grid: TokenGrid, density: float, device: torch.device | str
) -> tuple[TokenOrder, float]:
    order = sparge.grid_order(grid).on(device)
    return order, ranked_share(order, density)


def _halves(like: Tensor) -> tuple[Tensor, Tensor]:
    """Pool weights and routers: every second head has both."""
    every_second = torch.arange(len(like), device=like.device) % 2
    return every_second.float(), every_second.int() * Router.ERROR
