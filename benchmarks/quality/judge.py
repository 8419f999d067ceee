# SPDX-License-Identifier: Apache-2.0
"""Judge of one attention call: some of its queries, and errors against float32 on them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import metrics
from benchmarks.quality_data.layer import Layer
from sparge.blocks import QUERY_BLOCK
from sparge.order.grid import grid_order
from sparge.reference import Operands


@dataclass(frozen=True, eq=False)
class Call:
    """Attention call of a network, batch 1."""

    layer: Layer
    place: int = 0
    """Number of the layer among those judged, from 0, which tells the call's head settings."""

    @property
    def heads(self) -> int:
        return self.layer.q.shape[1]

    def operands(self, cubes: bool) -> Operands:
        """Operands in cube order, or as the tokens come."""
        return Operands.of(*self.layer[1:4], grid_order(self.layer.grid) if cubes else None)

    def truth(self, tokens: Tensor) -> Tensor:
        """(heads, rows, D): dense attention in float32 of the queries `tokens` (rows,)."""
        q, k, v = self.layer.q[:, :, tokens].float(), self.layer.k.float(), self.layer.v.float()
        return scaled_dot_product_attention(q, k, v)[0]

    def drawn(self, count: int, seed: int, avoid: Collection[int]) -> Tensor:
        """Tokens of `count` query blocks at random, in cube order, none of them exact and none of
        `avoid`.

        Raises:
            ValueError: there are fewer.
        """
        order = grid_order(self.layer.grid).of_kind(0)
        exact = set(order.queries_exact.nonzero().flatten().tolist())
        blocks = order.slot_token.long().split(QUERY_BLOCK)
        left = sorted(set(range(len(blocks))) - exact - set(avoid))
        if len(left) < count:
            raise ValueError(
                f"The call has {len(left)} query blocks that the measurement did not see; {count} "
                "are asked for. Ask for fewer blocks or more tokens."
            )
        places = torch.randperm(len(left), generator=torch.Generator().manual_seed(seed))[:count]
        found = torch.cat([blocks[left[place]] for place in sorted(places.tolist())])
        return found[found >= 0].to(self.layer.q.device)


@dataclass(frozen=True)
class HeadError:
    """Error of one head of one call against float32, over the judged rows."""

    name: str
    rel_l2: float
    psnr: float
    """Decibels below the range of the head's true output."""


def head_errors(name: str, value: Tensor, truth: Tensor) -> list[HeadError]:
    """Errors of value against truth, both (heads, rows, D)."""
    return [
        HeadError(f"{name} head {head}", metrics.rel_l2(own, true), psnr(own, true))
        for head, (own, true) in enumerate(zip(value, truth, strict=True))
    ]


def psnr(value: Tensor, truth: Tensor, extent: float | None = None) -> float:
    """Decibels of `extent`, the range of `truth` when None, over the root mean square error."""
    noise = float((value.double() - truth.double()).square().mean())
    if extent is None:
        extent = float(truth.max()) - float(truth.min())
    return math.inf if noise == 0 else 10 * math.log10(extent**2 / noise)


def summary(errors: Sequence[HeadError]) -> dict[str, float | str]:
    """Means over heads and layers, and the worst of them."""
    worst = max(errors, key=lambda error: error.rel_l2)
    return {
        "rel_l2": mean(error.rel_l2 for error in errors),
        "psnr": mean(error.psnr for error in errors),
        "worst_rel_l2": worst.rel_l2,
        "worst_head": worst.name,
    }
