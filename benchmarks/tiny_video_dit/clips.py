# SPDX-License-Identifier: Apache-2.0
"""Scenes drawn as clips, whole batches at once, by the same few tensor operations on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, one_hot

from benchmarks.tiny_video_dit.scenes import LATTICE, OBJECTS, SHAPES, TEXTURES, TIME_UNIT, Scenes

OCTAVES = ((1.0, 1.0), (2.7, 0.5))  # frequency and weight of the ground's layers
OUTPUT_SCALE = 2.5
RIM = 0.35  # how much darker an object is at its rim
#: Share of the camera's pan with which an object at the back moves; one in front moves with more.
PARALLAX = (0.7, 1.3)


def draw_clips(scenes: Scenes, size: tuple[int, int, int], magnified: float = 1.0) -> Tensor:
    """(B, frames, rows, columns, 3) float32 in [0, 1], for size (frames, rows, columns).

    magnified: pixels of the clip to a pixel of the scenes' lengths.
    """
    seconds, sight = _line_of_sight(scenes, size, magnified)
    picture = _ground(scenes, sight - _moved(scenes.pan, seconds))
    for k in range(OBJECTS):
        share = PARALLAX[0] + (PARALLAX[1] - PARALLAX[0]) * k / (OBJECTS - 1)
        own = scenes.velocity[:, k] + share * scenes.pan
        place = scenes.centre[:, k].view(-1, 1, 1, 1, 2) + _moved(own, seconds)
        colour, cover = _object(scenes, k, sight - place, seconds, magnified)
        picture = torch.lerp(picture, colour, cover.unsqueeze(-1))
    return picture


def _line_of_sight(
    scenes: Scenes, size: tuple[int, int, int], magnified: float
) -> tuple[Tensor, Tensor]:
    """Line of sight: time (frames, 1, 1), and where each pixel looks (B, frames, rows, columns, 2):
    x, y."""
    device = scenes.ground.device
    frames, rows, columns = (torch.arange(n, device=device, dtype=torch.float32) for n in size)
    y, x = torch.meshgrid(rows - rows.mean(), columns - columns.mean(), indexing="ij")
    time = (frames / TIME_UNIT).view(-1, 1, 1)
    turn = scenes.turn.view(-1, 1, 1, 1) * time
    scale = torch.exp(scenes.zoom.view(-1, 1, 1, 1) * time) / magnified
    cos, sin = turn.cos() * scale, turn.sin() * scale
    return time, torch.stack([cos * x - sin * y, sin * x + cos * y], -1)


def _moved(velocity: Tensor, time: Tensor) -> Tensor:
    """(B, frames, 1, 1, 2)"""
    return velocity.view(-1, 1, 1, 1, 2) * time.unsqueeze(-1)


def _ground(scenes: Scenes, place: Tensor) -> Tensor:
    """Colours of the ground: two mixed by smooth noise, mirrored where the lattice ends."""
    count, frames, rows, columns, _ = place.shape
    cells = place.reshape(count, frames * rows, columns, 2) / scenes.grain.view(-1, 1, 1, 1)
    height = torch.zeros((), device=place.device)
    for frequency, weight in OCTAVES:
        layer = grid_sample(
            scenes.lattice,
            cells * (2 * frequency / LATTICE),
            mode="bicubic",
            padding_mode="reflection",
            align_corners=False,
        )
        height = height + weight * layer
    mix = torch.sigmoid(OUTPUT_SCALE * height).view(count, frames, rows, columns, 1)
    first, second = scenes.ground.view(count, 1, 1, 1, 2, 3).unbind(4)
    return torch.lerp(first, second, mix)


def _object(
    scenes: Scenes, k: int, away: Tensor, time: Tensor, magnified: float
) -> tuple[Tensor, Tensor]:
    """Colour (B, frames, rows, columns, 3) and cover (B, frames, rows, columns) in [0, 1]."""

    def of_object(values: Tensor) -> Tensor:
        return values[:, k].view(-1, 1, 1, 1)

    turn = of_object(scenes.angle) + of_object(scenes.spin) * time
    radius = of_object(scenes.radius)
    x, y = (away / radius.unsqueeze(-1)).unbind(-1)
    x, y = turn.cos() * x + turn.sin() * y, turn.cos() * y - turn.sin() * x
    distance = torch.sqrt(x * x + y * y + 1e-6)
    outside = _chosen(scenes.shape[:, k], _shapes(x, y, distance), len(SHAPES))
    cover = (0.5 - outside * radius * magnified).clamp(0, 1) * of_object(scenes.present)
    waves = 2 * math.pi * radius / of_object(scenes.pitch)
    mix = _chosen(scenes.texture[:, k], _textures(x, y, distance, waves), len(TEXTURES))
    first, second = scenes.colours[:, k].view(-1, 1, 1, 1, 2, 3).unbind(4)
    light = 1 - RIM * (distance * distance).clamp(max=1)
    return torch.lerp(first, second, mix.unsqueeze(-1)) * light.unsqueeze(-1), cover


def _shapes(x: Tensor, y: Tensor, distance: Tensor) -> tuple[Tensor, ...]:
    """Distance to the edge in radii, negative inside, in SHAPES' order."""
    slant = math.sqrt(3) / 2
    return (
        distance - 1,
        torch.maximum(x.abs(), y.abs()) - 0.85,
        torch.maximum(slant * x.abs() - 0.5 * y, y) - 0.5,
        (distance - 0.72).abs() - 0.28,
    )


def _textures(x: Tensor, y: Tensor, distance: Tensor, waves: Tensor) -> tuple[Tensor, ...]:
    """Share of the second colour, in TEXTURES' order."""
    along, across = torch.sin(waves * x), torch.sin(waves * y)
    return (
        0.5 + 0.5 * along,
        torch.sigmoid(6 * along * across),
        0.5 + 0.5 * torch.sin(waves * distance),
        (0.5 + 0.5 * y).clamp(0, 1),
    )


def _chosen(index: Tensor, options: tuple[Tensor, ...], count: int) -> Tensor:
    weights = one_hot(index, count).float().view(-1, count, 1, 1, 1).unbind(1)
    return sum((w * option for w, option in zip(weights, options, strict=True)), options[0] * 0)
