# SPDX-License-Identifier: Apache-2.0
"""Probes: whether heads still are as true as measured, seen in the sparse calls themselves.

probe = Probe.begin(layers=48, heads=24, workload=workload, device="cuda")
probe.expect(choices)                         # between two steps, whenever those change
probe.sample(layer, q, k, v, out, visit=0)    # now and then, after a sparse call; never waits
drift = probe.drift()                         # between two steps; waits for the GPU
errors = probe.relative_errors()              # at the end; waits for the GPU
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..blocks import QUERY_BLOCK
from ..order.grid import EMPTY
from ..stages.as_written import as_written
from .choices import HeadChoices
from .exact_rows import attend_rows
from .spread import ROW_STEP, spread_places, spread_rows
from .workload import Workload

#: Query blocks of every head that one probe compares (docs/experiments.md, Probed query blocks).
BLOCKS_A_SAMPLE = 4
#: Least and greatest drift that is believed: a probe may meet odd blocks.
DRIFT_LIMITS = (0.2, 5.0)


@dataclass(frozen=True, eq=False)
class Probe:
    """Sums over the probed query blocks; made by `begin`."""

    tokens: Tensor = field(repr=False)
    """(probed blocks, rows a block) int64: tokens by which a block is compared, of the query blocks
    that may drop something."""
    empty: Tensor = field(repr=False)
    """(probed blocks, rows a block) bool: the slot holds no token."""
    weights: Tensor = field(repr=False)
    """(2, layers, heads) float64, weights of `squares` in `totals`: 1, and the squared relative
    error that the choices in force should leave."""
    squares: Tensor = field(repr=False)
    """(2, layers, heads) float64: squared error, found and expected, since the last `drift`."""
    totals: Tensor = field(repr=False)
    """(2, layers, heads) float64: squared error and squared norm over the whole run."""
    samples: list[int] = field(repr=False)
    """Number of probes of each layer."""

    @classmethod
    def begin(
        cls, *, layers: int, heads: int, workload: Workload, device: torch.device | str
    ) -> Probe:
        """Returns an empty probe. Allocates all that it keeps, so call it where sampling or a
        forward pass starts."""
        if workload.is_causal:
            raise ValueError("Causal attention is not probed: compare it with dense attention.")
        slots = workload.order.slot_token.cpu().long()
        by_block = torch.nn.functional.pad(slots, (0, -slots.numel() % QUERY_BLOCK), value=EMPTY)
        by_block = by_block.view(-1, QUERY_BLOCK)[:, spread_rows(ROW_STEP)]
        tokens = by_block[workload.sparse_query_blocks()].to(device)
        sums = torch.zeros(2, layers, heads, dtype=torch.float64, device=device)
        weights = torch.zeros_like(sums)
        weights[0] = 1
        return cls(tokens.clamp(min=0), tokens == EMPTY, weights, sums, sums.clone(), [0] * layers)

    def expect(self, choices: HeadChoices) -> None:
        """Sets the choices that calls obey from now on."""
        self.weights[1].copy_(choices.error.double().square())

    def sample(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        visit: int,
        scale: float | None = None,
    ) -> None:
        """Compares rows of `out` (B, H, N, D), which a sparse call gave, with exact attention of q
        (B, H, N, D) over all of k, v (B, Hkv, N, D), all in the caller's token order.

        visit: number of the step among those that probe the layer. Each compares other query
        blocks, evenly spread, the same in every run, and the same ones however the batch entries of
        a step are split into calls.
        """
        count = len(self.tokens)
        # From the middle, not with the blocks that calibration began with.
        first = count // 2 + visit * BLOCKS_A_SAMPLE + layer
        blocks = spread_places(count, first, BLOCKS_A_SAMPLE)
        tokens = torch.cat([self.tokens[block] for block in blocks])
        empty = torch.cat([self.empty[block] for block in blocks]).unsqueeze(-1)
        with as_written(q.device):
            exact = attend_rows(q[:, :, tokens], k, v, scale)
        error_and_norm = torch.stack([out[:, :, tokens] - exact, exact]).masked_fill_(empty, 0)
        squares = torch.linalg.vector_norm(error_and_norm, dim=(1, 3, 4)).double().square()
        self.squares[:, layer] += self.weights[:, layer] * squares
        self.totals[:, layer] += squares
        self.samples[layer] += len(blocks)

    def drift(self) -> Tensor:
        """(layers, heads) float64 on the CPU: errors since the last drift over those expected,
        within DRIFT_LIMITS; 1 where nothing was probed.

        Errors are whole ones, rounding included. Where rounding makes most of what is expected,
        nothing can be told of the rest, and this stays near 1.
        """
        found, expected = self.squares.cpu()
        drift = (found / expected).sqrt()
        drift = drift.clamp(*DRIFT_LIMITS).where((expected > 0) & drift.isfinite(), 1.0)
        self.squares.zero_()
        return drift

    def relative_errors(self) -> Tensor:
        """(layers, heads) float32 on the CPU, over the whole run; NaN where nothing was probed."""
        error, norm = self.totals.cpu()
        errors = (error / norm).sqrt()
        probed = torch.tensor(self.samples, device="cpu") > 0
        return errors.where(probed.unsqueeze(-1), torch.nan).float()
