# SPDX-License-Identifier: Apache-2.0
"""Scenes that clips show, as numbers.

A scene is a textured ground under a moving camera, and objects that move, turn and hide each other.
The same numbers, projected by fixed random signs, are the text. Lengths are pixels, times are units
of TIME_UNIT frames, angles radians; the origin is the middle of the picture at time zero.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

OBJECTS = 6  # at most; later ones hide earlier ones
TEXT_TOKENS = 1 + OBJECTS  # the ground with the camera, then the objects
TEXT_WIDTH = 64
SHAPES = ("disc", "square", "triangle", "ring")
TEXTURES = ("stripes", "checks", "rings", "shade")
TIME_UNIT = 20  # frames
FULL_ROWS, FULL_COLUMNS = 136, 240  # pixels of the largest picture; smaller ones hold fewer objects
LATTICE = 24  # random values a side that the ground is made of
TEXT_SEED = 20250321
#: Scales a token to about unit variance (measured over random scenes).
TEXT_GAIN = 0.35


@dataclass(frozen=True, eq=False)
class Scenes:
    """A batch of B scenes; K = OBJECTS.

    Attributes:
        ground: (B, 2, 3) the two colours of the ground, in [0, 1].
        lattice: (B, 1, LATTICE, LATTICE) where they are; the text does not say.
        grain: (B,) distance of lattice points.
        pan: (B, 2) camera velocity, x and y.
        zoom: (B,) rate of the logarithm of the scale.
        turn: (B,) camera's angular velocity.
        present: (B, K) 0 or 1.
        shape, texture: (B, K) index into SHAPES and TEXTURES.
        colours: (B, K, 2, 3) in [0, 1].
        radius, pitch: (B, K) size, and wavelength of the texture.
        centre, velocity: (B, K, 2) x and y, centre at time zero.
        angle, spin: (B, K) angle at time zero, angular velocity.
    """

    ground: Tensor
    lattice: Tensor
    grain: Tensor
    pan: Tensor
    zoom: Tensor
    turn: Tensor
    present: Tensor
    shape: Tensor
    texture: Tensor
    colours: Tensor
    radius: Tensor
    pitch: Tensor
    centre: Tensor
    velocity: Tensor
    angle: Tensor
    spin: Tensor

    def __len__(self) -> int:
        return self.ground.shape[0]

    def to(self, device: torch.device | str) -> Scenes:
        return Scenes(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def draw_scenes(count: int, size: tuple[int, int, int], generator: torch.Generator) -> Scenes:
    """Random scenes for clips of size (frames, rows, columns) in pixels, on generator's device."""
    frames, rows, columns = size
    device = generator.device

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        drawn = torch.rand(count, *shape, generator=generator, device=device)
        return low + (high - low) * drawn

    def normal(*shape: int, deviation: float) -> Tensor:
        return deviation * torch.randn(count, *shape, generator=generator, device=device)

    def index(options: tuple[str, ...]) -> Tensor:
        return torch.randint(len(options), (count, OBJECTS), generator=generator, device=device)

    area = min(1.0, rows * columns / (FULL_ROWS * FULL_COLUMNS))
    most = 1 + (OBJECTS - 1) * area
    room = min(1.0, rows / FULL_ROWS) ** 0.5
    velocity = normal(OBJECTS, 2, deviation=60.0)
    # Placed in the picture half way through, so that it comes and goes rather than being away.
    middle = (uniform(OBJECTS, 2) - 0.5) * _pair(0.85 * columns, 0.85 * rows, device)
    half_way = (frames - 1) / 2 / TIME_UNIT
    radius = 10.0 * 3.2 ** uniform(OBJECTS) * room
    return Scenes(
        ground=uniform(2, 3),
        lattice=normal(1, LATTICE, LATTICE, deviation=1.0),
        grain=uniform(low=14.0, high=40.0),
        pan=normal(2, deviation=40.0),
        zoom=normal(deviation=0.15),
        turn=normal(deviation=0.2),
        present=(torch.arange(OBJECTS, device=device) < 1 + uniform(1) * most).float(),
        shape=index(SHAPES),
        texture=index(TEXTURES),
        colours=uniform(OBJECTS, 2, 3),
        radius=radius,
        pitch=radius * uniform(OBJECTS, low=0.5, high=1.2),
        centre=middle - velocity * half_way,
        velocity=velocity,
        angle=uniform(OBJECTS, high=2 * math.pi),
        spin=normal(OBJECTS, deviation=1.5),
    )


def context(scenes: Scenes) -> Tensor:
    """(B, TEXT_TOKENS, TEXT_WIDTH) float32; all zeros is the empty text."""
    described = torch.cat([_ground_attributes(scenes).unsqueeze(1), _object_attributes(scenes)], 1)
    slots = torch.eye(TEXT_TOKENS, device=described.device).expand(len(scenes), -1, -1)
    attributes = torch.cat([slots, described], 2)
    return attributes @ _signs(attributes.shape[-1], described.device) * TEXT_GAIN


def _object_attributes(scenes: Scenes) -> Tensor:
    """(B, K, attributes), each of about unit size; zeros where no object is."""
    half = _pair(FULL_COLUMNS / 2, FULL_ROWS / 2, scenes.centre.device)
    one_hot = torch.nn.functional.one_hot
    parts = (
        one_hot(scenes.shape, len(SHAPES)),
        one_hot(scenes.texture, len(TEXTURES)),
        2 * scenes.colours.flatten(2) - 1,
        scenes.centre / half,
        scenes.velocity / 60,
        torch.stack([scenes.angle.sin(), scenes.angle.cos(), scenes.spin / 1.5], 2),
        torch.stack([scenes.radius / 20, scenes.pitch / 20, torch.ones_like(scenes.spin)], 2),
    )
    return torch.cat(parts, 2) * scenes.present.unsqueeze(2)


def _ground_attributes(scenes: Scenes) -> Tensor:
    """(B, attributes), padded with zeros to as many as an object has."""
    camera = (scenes.pan[:, 0] / 40, scenes.pan[:, 1] / 40, scenes.zoom / 0.15, scenes.turn / 0.2)
    said = torch.cat(
        [2 * scenes.ground.flatten(1) - 1, torch.stack([*camera, scenes.grain / 27 - 1], 1)], 1
    )
    of_object = len(SHAPES) + len(TEXTURES) + 16
    return torch.nn.functional.pad(said, (0, of_object - said.shape[1]))


@cache  # like _signs': a copy to the GPU would wait for it
def _pair(x: float, y: float, device: torch.device) -> Tensor:
    return torch.tensor([x, y], device=device)


@cache
def _signs(attributes: int, device: torch.device) -> Tensor:
    """(attributes, TEXT_WIDTH) of +1 and -1. Python's generator, the same in every version."""
    drawn = random.Random(TEXT_SEED)
    rows = [[drawn.choice((-1.0, 1.0)) for _ in range(TEXT_WIDTH)] for _ in range(attributes)]
    return torch.tensor(rows, device=device)
