# SPDX-License-Identifier: Apache-2.0
"""Random q, k, v of many kinds, and the ways in which they can lie in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Kinds of data. Rounding errors of STRUCTURED ones are alike, where those of the others are as
#: good as independent: what `tests.fuzz.bounds` makes of them differs.
STRUCTURED = ("equal rows", "sparse", "zeros", "constant values", "tiny")
KINDS = (
    *("noise", "smooth", "clusters") * 3,
    *("outliers", "steep") * 2,
    "huge values",
    *STRUCTURED,
)
MEMORY = ("packed", "offset", "padded", "gapped", "expanded")


@dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int

    def of(self, name: str) -> tuple[int, int, int, int]:
        heads, tokens = (self.heads, self.queries) if name == "q" else (self.kv_heads, self.keys)
        return self.batch, heads, tokens, self.head_dim


def draw_values(kind: str, sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
    """q (B, H, Nq, D), k and v (B, Hkv, Nk, D), float32 on the CPU."""
    values = {name: torch.randn(sizes.of(name), generator=generator) for name in "qkv"}
    if kind in ("smooth", "clusters"):
        for name in "qkv":
            values[name] = _drift(values[name], generator, clusters=kind == "clusters")
    elif kind == "outliers":
        values["k"][..., :: max(2, sizes.head_dim // 3)] += 20.0
    elif kind == "steep":
        values["q"] *= 5.0
    elif kind == "huge values":
        values["v"] *= 3e4
    elif kind == "equal rows":
        values = {name: x[:, :, :1].expand_as(x).clone() for name, x in values.items()}
    elif kind == "sparse":
        for name in "qkv":
            values[name] *= torch.rand(sizes.of(name), generator=generator) < 0.1
    elif kind == "zeros":
        values["q" if torch.rand((), generator=generator) < 0.5 else "k"].zero_()
    elif kind == "constant values":
        values["v"][:] = 0.7265625
    elif kind == "tiny":
        values = {name: x * 1e-4 for name, x in values.items()}
    return values


def _drift(noise: Tensor, generator: torch.Generator, clusters: bool) -> Tensor:
    """Drift along the tokens: those that lie together are alike. Each head has a mean of its own.

    So blocks differ. In clusters every 64 tokens scatter by another amount, 0.03 to 3: by their
    mass, by how far they are from the rest and by how they scatter, blocks then rank differently.
    """
    batch, heads, tokens, channels = noise.shape
    run = 64 if clusters else 32
    knots = torch.randn(batch, heads, -(-tokens // run), channels, generator=generator)
    near = knots.repeat_interleave(run, 2)[:, :, :tokens]
    mean = torch.randn(1, heads, 1, channels, generator=generator)
    if not clusters:
        return 0.6 * noise + near + mean
    near = 0.3 * near
    scatter = 10 ** (2 * torch.rand(batch, heads, knots.shape[2], 1, generator=generator) - 1.5)
    return scatter.repeat_interleave(run, 2)[:, :, :tokens] * noise + near + mean


def lay_out(
    x: Tensor, layout: str, memory: str, device: torch.device | str, rng: random.Random
) -> Tensor:
    """x (B, H, N, D) as a tensor of that layout, the last dimension contiguous. Whatever lies
    between its rows is NaN."""
    x = x.to(device)
    if layout == "NHD":
        x = x.transpose(1, 2)
    sizes = list(x.shape)
    if memory == "expanded":  # one batch entry or head for all
        axis = rng.choice([0, 1] if layout == "HND" else [0, 2])
        return x.narrow(axis, 0, 1).expand(sizes)
    if memory == "packed":
        return x.contiguous()
    room = [sizes[0], sizes[1], sizes[2], sizes[3]]
    start = [0, 0, 0, 0]
    if memory == "offset":
        start[3] = rng.choice([1, 3, 8])
        room[3] += start[3]
    elif memory == "padded":
        room[3] += rng.choice([1, 5, 8, 24])
        room[1] += rng.choice([0, 2])
    else:  # every second row of a larger tensor, as of fused projections
        room[2] *= 2
    store = torch.full(room, torch.nan, dtype=x.dtype, device=x.device)
    step = 2 if memory == "gapped" else 1
    view = store[:, : sizes[1], : sizes[2] * step : step, start[3] : start[3] + sizes[3]]
    view.copy_(x)
    return view


def poison_beyond(x: Tensor, lengths: Sequence[int], value: float) -> None:
    """Fills keys of x (B, H, N, D) at and beyond its length with `value`, in place: nobody may read
    them."""
    for entry, length in enumerate(lengths):
        x[entry, :, max(0, length) :] = value
