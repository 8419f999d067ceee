# SPDX-License-Identifier: Apache-2.0
"""Modes through `sparge.attention`: the kernels on a GPU, the reference elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

import sparge
from benchmarks.quality.judge import Call, Sample
from benchmarks.quality.modes import Mode
from benchmarks.quality.rows import REFERENCE
from sparge.head_settings import HeadBudget
from sparge.order.grid import TokenGrid, TokenOrder, grid_order, unmeasured_order


def why_not(mode: Mode) -> str:
    """Reason why `sparge.attention` cannot run this mode; empty where it can."""
    if mode.centroid:
        return "one pooled term a query block is a peer's method, which the library does not have"
    return ""


def where(device: torch.device) -> str:
    """Place where `sparge.attention` runs: the GPU's name for the kernels, or the reference."""
    if sparge.capabilities(device).usable:
        return torch.cuda.get_device_name(device)
    return REFERENCE


def attend_call(
    mode: Mode, call: Call, budget: HeadBudget, judged: Sample
) -> tuple[Tensor, Tensor]:
    """Output (heads, rows, D) float32 at the sampled tokens, and the density (heads,) float64,
    that of all heads together in each."""
    q, k, v = call.layer.q, call.layer.k, call.layer.v
    stats = sparge.AttentionStats(q.device)
    order = order_of(mode, call.layer.grid, q.device)
    out = attention(mode, q, k, v, budget.on(q.device), order, stats, call.is_causal)
    density = torch.full((call.heads,), stats.density, dtype=torch.float64)
    return out[0, :, judged.tokens], density


def order_of(
    mode: Mode, grid: TokenGrid | None, device: torch.device, turn: int = 0
) -> TokenOrder | None:
    """All token orders where each head has its own, else the order of the variant, cubes in the
    first, or the order that the tokens come in."""
    if grid is None or not mode.cubes:
        return None
    return (grid_order if mode.measured else unmeasured_order)(grid, turn).on(device)


def attention(
    mode: Mode,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    budget: HeadBudget,
    order: TokenOrder | None,
    stats: sparge.AttentionStats,
    is_causal: bool = False,
) -> Tensor:
    """(B, H, N, D) float32 in token order. `budget` and `order` on q's device."""
    policy, own = mode.rules(budget, is_causal)
    return sparge.attention(
        q,
        k,
        v,
        policy,
        is_causal=is_causal,
        order=order,
        budget=own,
        stats=stats,
        output_dtype=torch.float32,
    )
