# SPDX-License-Identifier: Apache-2.0
"""Methods compared, all with 8-bit operands: what each keeps, and its substitute for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import sparge
from benchmarks.cases import share_of
from benchmarks.quality.rows import EMULATION, REFERENCE
from benchmarks.quality.sol import sol_attention
from sparge.head_settings import HeadSettings
from sparge.order.grid import TokenGrid, TokenOrder, grid_order, unmeasured_order
from sparge.order.variants import VARIANTS
from sparge.policy import SparsePolicy
from sparge.reference import Operands, route


@dataclass(frozen=True)
class Mode:
    name: str
    cubes: bool
    """Cube order; else the order that the tokens come in."""
    sol: bool = False
    """One pooled term a query block, from its mean query, for all that it drops."""
    measured: bool = False
    """Whether what a head keeps, and how it makes up for the rest, was measured and chosen under
    the mean density."""

    @property
    def variants(self) -> int:
        """Number of variants of the token order that the steps of a sampling run take in turn."""
        return VARIANTS if self.cubes and not self.sol else 1

    def rules(self, head_settings: HeadSettings) -> tuple[SparsePolicy, HeadSettings | None]:
        """Arguments that attention is given for `head_settings`: a policy says what it can say of
        them, as in mode manual of the node."""
        if self.measured:
            return SparsePolicy(), head_settings
        return SparsePolicy(topk=head_settings.density), None


MODES = (
    # Upstream SpargeAttn: pooled top-k, dropped blocks are gone.
    Mode("drop", cubes=False),
    # Sol-Attn (arXiv 2607.24027) orders tokens along a space-filling curve. ComfyUI's port leaves
    # that out; with cubes it is the harder one to beat.
    Mode("sol", cubes=True, sol=True),
    # Mode of the library without a measurement.
    Mode("ours manual", cubes=True),
    Mode("ours auto", cubes=True, measured=True),
)
BY_NAME = {mode.name: mode for mode in MODES}


def where(mode: Mode, device: torch.device) -> str:
    """Place where a mode runs: the GPU's name for the kernels, the reference on a CPU, or an
    emulation of a peer's method, which the library does not have."""
    if mode.sol:
        return EMULATION
    usable = sparge.capabilities(device).usable
    return torch.cuda.get_device_name(device) if usable else REFERENCE


def order_of(
    mode: Mode, grid: TokenGrid, device: torch.device, variant: int = 0
) -> TokenOrder | None:
    """All token orders where each head has its own, else the order of the variant, cubes in the
    first, or the order that the tokens come in."""
    if not mode.cubes:
        return None
    return (grid_order if mode.measured else unmeasured_order)(grid, variant).on(device)


def attention(
    mode: Mode,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_settings: HeadSettings,
    order: TokenOrder | None,
) -> tuple[Tensor, Callable[[], float]]:
    """(B, H, N, D) float32 in token order, and a function that waits for the density.
    `head_settings` and `order` are on q's device."""
    if mode.sol:
        out, density = sol_attention(q, k, v, float(head_settings.density[0]), order)
        return out, lambda: density
    policy, own = mode.rules(head_settings)
    stats = sparge.AttentionStats(q.device)
    options = {"order": order, "head_settings": own, "stats": stats, "output_dtype": torch.float32}
    out = sparge.attention(q, k, v, policy, **options)
    return out, lambda: stats.density


def share_for(mode: Mode, x: Operands, density: float) -> float:
    """Largest share of key blocks a query block whose density does not exceed `density`.

    They differ, as forced blocks come on top. A density that those alone exceed gives the least
    share there is.
    """
    blocks, scale = x.key_counts.shape[1], x.head_dim**-0.5

    def density_of(count: int) -> float:
        policy, own = mode.rules(HeadSettings.uniform(x.heads, share_of(count, blocks)))
        return route(x, policy, own, scale=scale).density()

    low, high = 1, blocks + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if density_of(middle) <= density else (low, middle)
    return share_of(low, blocks)
