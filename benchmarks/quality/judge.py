# SPDX-License-Identifier: Apache-2.0
"""Judge of one attention call: its sampled query blocks, and errors against float32 on them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.quality.modes import ELEMENT
from benchmarks.quality_data.layer import Layer
from sparge.blocks import QUERY_BLOCK
from sparge.common import metrics
from sparge.kernels.spec import Element
from sparge.order.grid import grid_order
from sparge.reference.packed import Packed, pack_qkv

PERCENTILE = 0.95


@dataclass(frozen=True, eq=False)
class Call:
    """Attention call of a network, batch 1, quantized in both orders."""

    layer: Layer
    is_causal: bool
    element: Element = ELEMENT
    place: int = 0
    """Number of the layer among those judged, from 0, which tells the call's head settings."""
    _walked: dict[int, Packed] = field(default_factory=dict, init=False, repr=False)

    @property
    def heads(self) -> int:
        return self.layer.q.shape[1]

    @cached_property
    def raster(self) -> Packed:
        return pack_qkv(self.layer.q, self.layer.k, self.layer.v, element=self.element)

    @property
    def cubes(self) -> Packed:
        return self.walked(0)

    def walked(self, walk: int) -> Packed:
        """Packing in one of the token orders of `grid_order`; raster where the tokens have no
        grid.
        """
        if self.layer.grid is None:
            return self.raster
        if walk not in self._walked:
            order = grid_order(self.layer.grid).walk(walk)
            q, k, v = self.layer.q, self.layer.k, self.layer.v
            self._walked[walk] = pack_qkv(q, k, v, order, element=self.element)
        return self._walked[walk]

    def packed(self, cubes: bool) -> Packed:
        return self.cubes if cubes else self.raster

    def truth(self, tokens: Tensor) -> Tensor:
        """(heads, rows, D): dense attention in float32 of the queries `tokens` (rows,)."""
        seen = None
        if self.is_causal:
            keys = torch.arange(self.layer.k.shape[2], device=tokens.device)
            seen = keys <= tokens.unsqueeze(-1)
        q, k, v = self.layer.q[:, :, tokens].float(), self.layer.k.float(), self.layer.v.float()
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0]


@dataclass(frozen=True, eq=False)
class Sample:
    """Some query blocks of a packing: blocks (nq,) bool, their occupied slots, and the tokens."""

    blocks: Tensor
    slots: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, packed: Packed, blocks: Collection[int]) -> Sample:
        device = packed.query_counts.device
        wanted = torch.zeros(len(packed.query_counts), dtype=torch.bool, device=device)
        wanted[list(blocks)] = True
        rows = wanted.repeat_interleave(QUERY_BLOCK)[: packed.operands.n_queries]
        slots = (rows & packed.occupied).nonzero().squeeze(-1)
        tokens = slots if packed.order is None else packed.order.slot_token[slots].long()
        return cls(wanted, slots, tokens)

    @classmethod
    def holding(cls, packed: Packed, tokens: Tensor) -> Sample:
        """Sample of the query blocks of a packing with an order that hold `tokens`, and those alone
        as rows, in the order given."""
        assert packed.order is not None  # token orders need a grid
        slots = packed.order.token_slot[tokens].long()
        blocks = torch.zeros(len(packed.query_counts), dtype=torch.bool, device=slots.device)
        blocks[slots // QUERY_BLOCK] = True
        return cls(blocks, slots, tokens)

    @classmethod
    def draw(cls, packed: Packed, count: int, seed: int, avoid: Collection[int]) -> Sample:
        """`count` query blocks at random, none of them exact and none of `avoid`.

        Raises:
            ValueError: there are fewer.
        """
        exact = () if packed.order is None else packed.order.queries_exact.nonzero().flatten()
        left = sorted(set(range(len(packed.query_counts))) - set(map(int, exact)) - set(avoid))
        if len(left) < count:
            raise ValueError(
                f"The call has {len(left)} query blocks that calibration did not see; {count} are "
                "asked for. Ask for fewer blocks or more tokens."
            )
        random = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(left), generator=random)[:count]
        return cls.of(packed, [left[place] for place in drawn.tolist()])


@dataclass(frozen=True)
class HeadError:
    """Error of one head of one call against float32, over the sampled rows."""

    name: str
    density: float
    rel_l1: float
    rel_l2: float
    cos: float
    psnr: float
    """Decibels below the range of the head's true output."""


def head_errors(name: str, value: Tensor, truth: Tensor, density: Tensor) -> list[HeadError]:
    """Errors of value against truth, both (heads, rows, D); density (heads,)."""
    return [
        HeadError(
            f"{name} head {head}",
            float(density[head]),
            metrics.rel_l1(value[head], truth[head]),
            metrics.rel_l2(value[head], truth[head]),
            metrics.cosine(value[head], truth[head]),
            psnr(value[head], truth[head]),
        )
        for head in range(len(value))
    ]


def psnr(value: Tensor, truth: Tensor, extent: float | None = None) -> float:
    """Decibels of `extent`, the range of `truth` when None, over the root mean square error."""
    noise = float((value.double() - truth.double()).square().mean())
    if extent is None:
        extent = float(truth.max()) - float(truth.min())
    return math.inf if noise == 0 else 10 * math.log10(extent**2 / noise)


def summary(errors: Sequence[HeadError]) -> dict[str, float | str]:
    """Means over heads and layers, and the worst of them."""
    count = len(errors)
    worst = max(errors, key=_rel_l2)
    ordered = sorted(error.rel_l1 for error in errors)
    return {
        "density": sum(error.density for error in errors) / count,
        "rel_l1": sum(error.rel_l1 for error in errors) / count,
        "rel_l2": sum(error.rel_l2 for error in errors) / count,
        "cos": sum(error.cos for error in errors) / count,
        "p95_rel_l1": ordered[math.ceil(PERCENTILE * count) - 1],
        "psnr": sum(error.psnr for error in errors) / count,
        "worst_rel_l2": worst.rel_l2,
        "worst_head": worst.name,
    }


def _rel_l2(error: HeadError) -> float:
    return error.rel_l2
