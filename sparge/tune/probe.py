# SPDX-License-Identifier: Apache-2.0
"""Probes: whether heads still are as true as measured, seen in the sparse calls themselves.

probe = Probe.begin(layers=48, heads=24, workload=workload, device="cuda")
probe.compare(layer, q, k, v, out, number=0)  # now and then, after a sparse call; never waits
errors = probe.relative_errors()            # at the end; waits for the GPU
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..blocks import QUERY_BLOCK
from ..common.torch_attention import exact_attention
from ..order.grid import EMPTY
from ..stages.as_written import as_written
from .spread import ROW_STEP, spread_places, spread_rows
from .workload import Workload

#: Query blocks of every head that one probe compares (docs/experiments.md, Probed query blocks).
BLOCKS_A_PROBE = 4
#: PyTorch's own order depends on who called it first, and the result must not. Without cuDNN, which
#: plans each new shape while the GPU waits (docs/experiments.md, Exact attention of few rows).
ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, eq=False)
class Probe:
    """Sums over the probed query blocks; made by `begin`."""

    tokens: Tensor = field(repr=False)
    """(probed blocks, rows a block) int64: tokens by which a block is compared, of the query blocks
    that may drop something."""
    empty: Tensor = field(repr=False)
    """(probed blocks, rows a block) bool: the slot holds no token."""
    totals: Tensor = field(repr=False)
    """(2, layers, heads) float64: squared error and squared norm over the whole run."""
    blocks_probed: list[int] = field(repr=False)
    """Number of probes of each layer."""

    @classmethod
    def begin(
        cls, *, layers: int, heads: int, workload: Workload, device: torch.device | str
    ) -> Probe:
        """Returns an empty probe. Allocates all that it keeps, so call it where sampling or a
        forward pass starts."""
        slots = workload.order.slot_token.cpu().long()
        by_block = torch.nn.functional.pad(slots, (0, -slots.numel() % QUERY_BLOCK), value=EMPTY)
        by_block = by_block.view(-1, QUERY_BLOCK)[:, spread_rows(ROW_STEP)]
        tokens = by_block[workload.sparse_query_blocks()].to(device)
        sums = torch.zeros(2, layers, heads, dtype=torch.float64, device=device)
        return cls(tokens.clamp(min=0), tokens == EMPTY, sums, [0] * layers)

    def compare(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        number: int,
        scale: float | None = None,
    ) -> None:
        """Compares rows of `out` (B, H, N, D), which a sparse call gave, with exact attention of q
        (B, H, N, D) over all of k, v (B, Hkv, N, D), all in the caller's token order.

        number: number of the step among those that probe the layer. Each compares other query
        blocks, evenly spread, the same in every run, and the same ones however the batch entries of
        a step are split into calls.
        """
        count = len(self.tokens)
        # From the middle, not with the blocks that measuring began with.
        first = count // 2 + number * BLOCKS_A_PROBE + layer
        blocks = spread_places(count, first, BLOCKS_A_PROBE)
        tokens = torch.cat([self.tokens[block] for block in blocks])
        empty = torch.cat([self.empty[block] for block in blocks]).unsqueeze(-1)
        with as_written(q.device):
            exact = attend_rows(q[:, :, tokens], k, v, scale)
        error_and_norm = torch.stack([out[:, :, tokens] - exact, exact]).masked_fill_(empty, 0)
        norms = torch.linalg.vector_norm(error_and_norm, dim=(1, 3, 4)).double()
        self.totals[:, layer] += norms.square()
        self.blocks_probed[layer] += len(blocks)

    def relative_errors(self) -> Tensor:
        """(layers, heads) float32 on the CPU, over the whole run; NaN where nothing was probed."""
        error, norm = self.totals.cpu()
        errors = (error / norm).sqrt()
        probed = torch.tensor(self.blocks_probed, device="cpu") > 0
        return errors.where(probed.unsqueeze(-1), torch.nan).float()


def attend_rows(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """(B, H, rows, D) float32: q (B, H, rows, D) attending to k, v (B, Hkv, N, D).

    An entry at a time: how flash splits the keys depends on the size of the batch, and the result
    must not.
    """
    entries = zip(q.split(1), k.to(q.dtype).split(1), v.to(q.dtype).split(1), strict=True)
    gqa = k.shape[1] != q.shape[1]
    with sdpa_kernel(ORDER, set_priority=True):
        outs = [exact_attention(*qkv, scale=scale, enable_gqa=gqa) for qkv in entries]
    return torch.cat(outs).float()
