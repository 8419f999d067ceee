# SPDX-License-Identifier: Apache-2.0
"""Video clips made from a seed: textured objects that move and turn, a camera, things in between.

A scene is a stack of layers, far to near. A layer has a texture and an outline in world units (the
frame is 1 high), moves through the world, and shifts with the camera by its nearness. Near layers
cover far ones, so objects are hidden and appear again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality_data.frames import Clip

Floats = NDArray[np.float64]
TEXTURE = 256  # texels along a texture, which repeats
WAVES = 5  # that make an outline, after the circle
OBJECTS = 7


@dataclass(frozen=True, eq=False)
class Sprite:
    """An object: its radius is `size * (1 + sum of outline waves)` around a moving centre."""

    texture: Floats  # (TEXTURE, TEXTURE, 3)
    size: float
    outline: Floats  # (WAVES, 2): height and phase of wave 2, 3, ... round the edge
    start: Floats  # centre (x, y) at time 0
    drift: Floats  # over the whole clip
    sway: Floats  # radius (x, y) of a swing of one period
    turn: float  # radians over the whole clip
    stretch: float  # height over width; a tall one is a post that others pass behind
    nearness: float  # how far it shifts when the camera moves by 1


def make_clip(frames: int, height: int, width: int, seed: int = 0) -> Clip:
    """(frames, height, width, 3) uint8, the same for the same arguments.

    Raises:
        ValueError: an extent below 1.
    """
    if min(frames, height, width) < 1:
        raise ValueError(f"A clip of {frames} x {height} x {width} is empty; extents start at 1.")
    random = np.random.default_rng(seed)
    ground, sky = _texture(random), _texture(random)
    horizon = random.uniform(0.25, 0.5)
    sprites = sorted((_sprite(random) for _ in range(OBJECTS)), key=_nearness)
    pan = random.uniform(0.1, 0.4, 2) * random.choice([-1, 1], 2) * (1, 0.3)
    zoom = random.uniform(-0.25, 0.25)
    shake = random.uniform(0, 2 * math.pi, 2)
    y, x = np.meshgrid(
        (np.arange(height) + 0.5) / height - 0.5,
        ((np.arange(width) + 0.5) - width / 2) / height,
        indexing="ij",
    )
    made = np.empty((frames, height, width, 3), np.uint8)
    for index in range(frames):
        time = index / max(frames - 1, 1)
        camera = pan * (time - 0.5) + 0.01 * np.sin(9 * time + shake)
        scale = math.exp(zoom * (time - 0.5))
        picture = _backdrop(x * scale, y * scale, camera, horizon - 0.5, ground, sky)
        for sprite in sprites:
            _paint(picture, sprite, x * scale, y * scale, camera, time, 1 / height)
        made[index] = np.clip(picture * 255 + 0.5, 0, 255)
    return made


def _backdrop(
    x: Floats,
    y: Floats,
    camera: Floats,
    horizon: float,
    ground: Floats,
    sky: Floats,
) -> Floats:
    """A plane in perspective below the horizon, a far wall of clouds above it."""
    below = y + 0.3 * camera[1] - horizon
    depth = 1 / np.maximum(below + 0.12, 0.12)
    plane = _look_up(ground, (x + camera[0]) * depth * 0.3, depth * 0.8 + camera[1])
    far = 0.6 + 0.4 * _look_up(sky, (x + 0.2 * camera[0]) * 0.3, (y + 0.2 * camera[1]) * 0.5)
    share = np.clip(below / 0.004 + 0.5, 0, 1)[..., None]
    haze = np.clip(below / 0.5, 0.25, 1)[..., None]
    return far * (1 - share) + (plane * haze + far * (1 - haze)) * share


def _paint(
    picture: Floats,
    sprite: Sprite,
    x: Floats,
    y: Floats,
    camera: Floats,
    time: float,
    pixel: float,
) -> None:
    centre = sprite.start + sprite.drift * (time - 0.5) - sprite.nearness * camera
    centre = centre + sprite.sway * (math.cos(2 * math.pi * time), math.sin(2 * math.pi * time))
    reach = sprite.size * (1 + np.abs(sprite.outline[:, 0]).sum()) * max(1, sprite.stretch)
    rows = np.flatnonzero((np.abs(y - centre[1]) < reach).any(1))
    columns = np.flatnonzero((np.abs(x - centre[0]) < reach).any(0))
    if not (len(rows) and len(columns)):
        return
    part = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    right, down = x[part] - centre[0], (y[part] - centre[1]) / sprite.stretch
    cos, sin = math.cos(sprite.turn * time), math.sin(sprite.turn * time)
    right, down = (right * cos + down * sin) / sprite.size, (down * cos - right * sin) / sprite.size
    angle, radius = np.arctan2(down, right), np.hypot(right, down)
    edge = 1 + sum(
        height * np.cos((wave + 2) * angle + phase)
        for wave, (height, phase) in enumerate(sprite.outline)
    )
    cover = np.clip((edge - radius) * sprite.size / pixel + 0.5, 0, 1)[..., None]
    # Round, and lit from above.
    light = np.clip(1.1 - 0.5 * radius**2 - 0.3 * down, 0.25, 1.3)[..., None]
    colour = _look_up(sprite.texture, right * 0.3, down * 0.3) * light
    picture[part] += cover * (colour - picture[part])


def _look_up(texture: Floats, u: Floats, v: Floats) -> Floats:
    """Bilinear; u and v in textures, which repeat."""
    column, row = u * TEXTURE, v * TEXTURE
    left, top = np.floor(column).astype(np.int64), np.floor(row).astype(np.int64)
    across = (column - left)[..., None]
    along = (row - top)[..., None]
    left, top, right, bottom = (at % TEXTURE for at in (left, top, left + 1, top + 1))
    upper = texture[top, left] * (1 - across) + texture[top, right] * across
    lower = texture[bottom, left] * (1 - across) + texture[bottom, right] * across
    return upper * (1 - along) + lower * along


def _sprite(random: np.random.Generator) -> Sprite:
    size, nearness = random.uniform(0.07, 0.22), random.uniform(0.5, 2)
    post = random.random() < 0.25
    heights = random.uniform(-0.3, 0.3, WAVES) / np.arange(1.5, WAVES + 1.5)
    return Sprite(
        texture=_texture(random),
        size=size * (0.4 if post else 1),
        outline=np.stack([heights * (not post), random.uniform(0, 2 * math.pi, WAVES)], 1),
        start=random.uniform((-0.7, -0.35), (0.7, 0.35)),
        drift=random.uniform(-0.6, 0.6, 2) * (not post) * (1, 0.5),
        sway=random.uniform(0, 0.08, 2) * (not post),
        turn=random.uniform(-2, 2) * (not post),
        stretch=12 if post else random.uniform(0.6, 1.6),
        nearness=nearness + post,
    )


def _nearness(sprite: Sprite) -> float:
    return sprite.nearness


def _texture(random: np.random.Generator) -> Floats:
    """(TEXTURE, TEXTURE, 3) in 0..1: two colours mixed by noise of every scale, often striped."""
    mix = sum(_noise(random, 2**octave) / 1.7**octave for octave in range(2, 8))
    mix = (mix - np.mean(mix)) / np.std(mix)
    if random.random() < 0.5:
        places = np.arange(TEXTURE) * 2 * math.pi / TEXTURE
        along, across = random.integers(-12, 13, 2)  # whole waves, so that the texture repeats
        mix = 0.5 * mix + 1.2 * np.sin(along * places[:, None] + across * places + 0.7 * mix)
    share = 1 / (1 + np.exp(-2 * mix))[..., None]
    one, other = random.uniform(0, 1, (2, 3))
    return one * share + other * (1 - share)


def _noise(random: np.random.Generator, cells: int) -> Floats:
    """(TEXTURE, TEXTURE), smooth between random values on cells x cells points; repeats."""
    values = random.standard_normal((cells, cells))
    place = np.arange(TEXTURE) * cells / TEXTURE
    first = place.astype(np.int64)
    share = place - first
    share = share * share * (3 - 2 * share)
    second = (first + 1) % cells
    rows = values[first] * (1 - share)[:, None] + values[second] * share[:, None]
    return rows[:, first] * (1 - share) + rows[:, second] * share
