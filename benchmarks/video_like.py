# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values shaped like a video transformer's, made from a seed.

Smooth fields and moving objects on a (frames, rows, columns) grid are projected by each head,
normalised, and given a 3-D rotary position. Heads differ as trained ones do: near neighbours, the
same place in other frames, the same object, everything, or a few sinks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

CONTENT_CHANNELS = 24
OBJECTS = 6


@dataclass(frozen=True)
class HeadKind:
    """Kind of head: how much of q and k is position (per axis) and how much content."""

    name: str
    axes: tuple[float, float, float]  # weight of the anchor that RoPE turns, for t, y, x
    content: float
    noise: float
    peak: float  # logit of a perfect match; sets how few keys hold the mass
    sink: float = 0.0  # logit that the first text token (or first token) gains


HEAD_KINDS = (
    HeadKind("local", (1.0, 1.0, 1.0), 0.7, 0.3, peak=36.0),
    HeadKind("local", (1.0, 1.0, 1.0), 0.4, 0.2, peak=24.0),
    HeadKind("stripe", (0.0, 1.2, 1.2), 0.5, 0.3, peak=32.0),
    HeadKind("object", (0.2, 0.3, 0.3), 1.5, 0.3, peak=12.0),
    HeadKind("flat", (0.3, 0.3, 0.3), 0.8, 0.8, peak=7.0),
    HeadKind("sink", (0.8, 1.0, 1.0), 0.6, 0.3, peak=24.0, sink=8.0),
)


@dataclass(frozen=True, eq=False)
class VideoLike:
    """q, k, v (1, heads, tokens, head_dim), tokens = grid in raster order, then text."""

    q: Tensor
    k: Tensor
    v: Tensor
    grid: tuple[int, int, int]
    text_tokens: int
    kinds: tuple[str, ...]


def video_like(
    grid: tuple[int, int, int],
    heads: int,
    head_dim: int,
    *,
    text_tokens: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> VideoLike:
    """The example for a grid (frames, rows, columns), the same for the same seed and device.

    Channel 0 of v is the picture itself, so that an output channel can be looked at.
    """
    random = torch.Generator(device).manual_seed(seed)
    content = _content(grid, text_tokens, random)
    positions = _positions(grid, text_tokens, content.device)
    kinds = tuple(HEAD_KINDS[h % len(HEAD_KINDS)] for h in range(heads))
    made = [_head(kind, content, positions, text_tokens, head_dim, random) for kind in kinds]
    q, k, v = (torch.stack(parts).unsqueeze(0).to(dtype) for parts in zip(*made, strict=True))
    return VideoLike(q, k, v, grid, text_tokens, tuple(kind.name for kind in kinds))


def _content(grid: tuple[int, int, int], text_tokens: int, random: torch.Generator) -> Tensor:
    """(tokens, CONTENT_CHANNELS), unit variance a channel; channel 0 is the picture."""
    frames, rows, columns = grid
    # Correlated over about 3 frames and 5 tokens of space, as latent features are.
    coarse = (max(2, frames // 3), max(2, rows // 5), max(2, columns // 5))
    field = interpolate(
        _randn((1, CONTENT_CHANNELS, *coarse), random),
        size=grid,
        mode="trilinear",
        align_corners=True,
    )[0]
    t, y, x = torch.meshgrid(
        *(torch.linspace(0, 1, n, device=random.device) for n in grid), indexing="ij"
    )
    for _ in range(OBJECTS):
        start, drift = _rand((2,), random), _randn((2,), random) * 0.4
        radius = 0.06 + 0.12 * _rand((1,), random)
        away = (y - start[0] - drift[0] * t) ** 2 + (x - start[1] - drift[1] * t) ** 2
        inside = torch.sigmoid((radius - away.sqrt()) * 40)
        code = 2.5 * _randn((CONTENT_CHANNELS, 1, 1, 1), random)
        field = field * (1 - inside) + code * inside
    tokens = field.flatten(1).T
    tokens = (tokens - tokens.mean(0)) / tokens.std(0)
    return torch.cat([tokens, _randn((text_tokens, CONTENT_CHANNELS), random)])


def _positions(grid: tuple[int, int, int], text_tokens: int, device: torch.device) -> Tensor:
    """(tokens, 3): t, y, x of each token; text sits at the origin."""
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in grid), indexing="ij")
    placed = torch.stack([axis.flatten() for axis in axes], -1).float()
    return torch.cat([placed, torch.zeros(text_tokens, 3, device=device)])


def _head(
    kind: HeadKind,
    content: Tensor,
    positions: Tensor,
    text_tokens: int,
    head_dim: int,
    random: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = content.shape[0]
    look = _randn((CONTENT_CHANNELS, head_dim), random) / math.sqrt(CONTENT_CHANNELS)
    anchor, angles = _rotary(kind, positions, head_dim)

    def project() -> Tensor:
        rows = anchor + kind.content * content @ look
        rows = rows + kind.noise * _randn((tokens, head_dim), random)
        rows = rows / rows.square().mean(-1, keepdim=True).sqrt()
        return _rotate(rows, angles) * math.sqrt(kind.peak / math.sqrt(head_dim))

    q, k = project(), project()
    if kind.sink:
        first = tokens - text_tokens if text_tokens else 0
        q_mean = q.mean(0)
        k[first] = q_mean * (kind.sink * math.sqrt(head_dim) / q_mean.square().sum())
    biased = torch.randperm(head_dim, generator=random, device=random.device)[:6]
    k[:, biased] += k.std() * (3 + 5 * _rand((6,), random))  # K channels 3 to 8 sigma off
    mix = _randn((CONTENT_CHANNELS, head_dim), random) / math.sqrt(CONTENT_CHANNELS)
    v = content @ mix + 0.5 * _randn((tokens, head_dim), random) + _randn((head_dim,), random)
    v[:, 0] = content[:, 0]
    return q, k, v


def _rotary(kind: HeadKind, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The anchor (head_dim,) that makes a head look by position, and angles (tokens, pairs)."""
    pairs = head_dim // 2
    share = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
    angles, weights = [], []
    for axis, count in enumerate(share):
        steps = torch.arange(count, device=positions.device) / count
        angles.append(positions[:, axis : axis + 1] * 10000.0**-steps)
        weights.append(torch.full((count,), kind.axes[axis], device=positions.device))
    weight = torch.cat(weights)
    return torch.cat([weight, torch.zeros_like(weight)]), torch.cat(angles, -1)


def _rotate(rows: Tensor, angles: Tensor) -> Tensor:
    first, second = rows.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def _randn(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=random, device=random.device)


def _rand(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=random, device=random.device)
