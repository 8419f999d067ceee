# SPDX-License-Identifier: Apache-2.0
"""Whether heads still are as true as measured, seen in the sparse calls themselves.

probe = Probe.begin(layers=48, heads=24, workload=workload, device="cuda")
probe.sample(layer, q, k, v, out)       # now and then, after a sparse call; never waits
probe.tighten(layer, budget, target)    # between two steps; never waits
errors = probe.relative_errors()        # at the end; waits for the GPU
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..plan.blocks import QUERY_BLOCK
from ..plan.budget import HeadBudget
from ..plan.grid import EMPTY
from .spread import spread_places
from .workload import Workload

#: Query blocks of every head that one sample compares. One block of a head is a coin toss; of eight
#: measured ones 89 to 94 % of DINOv2 video heads predict their error within a factor of 1.5.
BLOCKS_A_SAMPLE = 8
#: Past the target by this factor a head has drifted; below, it may be the luck of the sample.
TOLERANCE = 1.5
#: How much denser a head gets that has drifted. Around 20 % density this takes away a factor of 1.6
#: of the error (DINOv2: .038 at 20 %, .023 at 30 %), as much as TOLERANCE lets pass.
DENSER = 1.5


@dataclass(frozen=True, eq=False)
class Probe:
    """Sums over the probed query blocks; make it with `begin`."""

    tokens: Tensor = field(repr=False)
    """(probed blocks, 128) int64: the tokens of the query blocks that may drop something."""
    occupied: Tensor = field(repr=False)
    """The same shape, bool: the slot holds a token."""
    squares: Tensor = field(repr=False)
    """(2, layers, heads) float64: squared error and squared norm, since the head last changed."""
    totals: Tensor = field(repr=False)
    """The same over the whole run."""
    samples: list[int] = field(repr=False)
    """Of each layer."""

    @classmethod
    def begin(
        cls, *, layers: int, heads: int, workload: Workload, device: torch.device | str
    ) -> Probe:
        """Allocates all that probing keeps, so call it where sampling or a forward starts."""
        if workload.is_causal:
            raise ValueError("Causal attention is not probed: compare it with dense attention.")
        slots = workload.order.slot_token.cpu().long()
        by_block = torch.nn.functional.pad(slots, (0, -slots.numel() % QUERY_BLOCK), value=EMPTY)
        tokens = by_block.view(-1, QUERY_BLOCK)[workload.sparse_query_blocks()].to(device)
        sums = torch.zeros(2, layers, heads, dtype=torch.float64, device=device)
        return cls(tokens.clamp(min=0), tokens != EMPTY, sums, sums.clone(), [0] * layers)

    def sample(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float | None = None
    ) -> None:
        """Compare rows of `out` (B, H, N, D), which a sparse call gave, with exact attention of
        q (B, H, N, D) over all of k, v (B, Hkv, N, D), all in the caller's token order.

        Other query blocks in every sample, evenly spread, the same in every run.
        """
        count = len(self.tokens)
        # From the middle of the visit: not the blocks that calibration began with.
        first = count // 2 + self.samples[layer] + layer
        blocks = spread_places(count, first, BLOCKS_A_SAMPLE)
        tokens = torch.cat([self.tokens[block] for block in blocks])
        empty = ~torch.cat([self.occupied[block] for block in blocks]).unsqueeze(-1)
        exact = scaled_dot_product_attention(
            q[:, :, tokens],
            k.to(q.dtype),
            v.to(q.dtype),
            scale=scale,
            enable_gqa=k.shape[1] != q.shape[1],
        ).float()
        error = out[:, :, tokens].float() - exact
        for part, rows in enumerate((error, exact)):
            squared = rows.masked_fill(empty, 0).square().sum((0, 2, 3), dtype=torch.float64)
            self.squares[part, layer] += squared
            self.totals[part, layer] += squared
        self.samples[layer] += len(blocks)

    def tighten(self, layer: int, budget: HeadBudget, target: float) -> None:
        """Make those heads of `layer` denser, in place, that were further from exact attention than
        TOLERANCE times `target`; their next samples count afresh."""
        error, norm = self.squares[:, layer]
        drifted = error > (TOLERANCE * target) ** 2 * norm
        denser = (budget.density * DENSER).clamp(max=1)
        budget.set_density(torch.where(drifted, denser, budget.density))
        self.squares[:, layer] *= ~drifted

    def relative_errors(self) -> Tensor:
        """(layers, heads) float32 on the CPU, over the whole run; NaN where nothing was probed."""
        error, norm = self.totals.cpu()
        errors = (error / norm).sqrt()
        probed = torch.tensor(self.samples) > 0
        return errors.where(probed.unsqueeze(-1), torch.nan).float()
