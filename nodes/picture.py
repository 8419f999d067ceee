# SPDX-License-Identifier: Apache-2.0
"""Picture of the report: density by layer and step on the left, error by layer on the right."""

from __future__ import annotations

import textwrap

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from .result import RunResult
from .verdict import why_nothing

Colour = tuple[int, int, int]

PAPER, INK, FAINT = (255, 255, 255), (38, 38, 46), (224, 224, 230)
PREDICTED, PROBED = (89, 140, 217), (217, 77, 38)
#: Colours from nothing computed to everything: bright is fast, dark is dense.
SCALE = torch.tensor([[252, 232, 140], [140, 209, 128], [41, 140, 145], [51, 56, 117]]).float()

LEFT, TOP, GAP, BOTTOM, RIGHT = 56, 48, 48, 40, 24
MAP_WIDTH, ERROR_WIDTH, HEIGHT = 560, 240, 480
LARGEST_CELL, SMALL_CELL = 40, 6  # up to the small one there is no room for a gap
LINE_LENGTH, LINE_HEIGHT = 100, 16  # of a message
LABEL_EVERY = 24  # pixels between two numbers of an axis
FONT = ImageFont.load_default()


def draw(result: RunResult) -> Tensor:
    """(1, height, width, 3) float32, as ComfyUI's images are."""
    layers, steps = result.report.by_step.shape
    if not layers or not steps or result.tally.missing:
        return message(
            why_nothing(result).told or "no self-attention of a whole grid reached this node"
        )
    tall, wide = _cell(HEIGHT, layers), _cell(MAP_WIDTH, steps)
    height, map_width = max(layers * tall, 120), max(steps * wide, 240)
    right = LEFT + map_width + GAP
    size = right + ERROR_WIDTH + RIGHT, TOP + height + BOTTOM
    image = Image.new("RGB", size, PAPER)
    _density(image, result, tall, wide)
    _scale(image, TOP + height + 22)
    _errors(image, result, tall, right)
    return _tensor(image)


def message(text: str) -> Tensor:
    """Picture that says why there is none."""
    lines = textwrap.wrap(text, LINE_LENGTH)
    width = int(max(map(FONT.getlength, lines))) + 32
    image = Image.new("RGB", (width, 48 + LINE_HEIGHT * len(lines)), PAPER)
    for place, line in enumerate(lines):
        write(image, line, 27 + LINE_HEIGHT * place, 16)
    return _tensor(image)


def write(image: Image.Image, text: str, top: int, left: int, colour: Colour = INK) -> None:
    ImageDraw.Draw(image).text((left, top - 2), text, colour, FONT)


def _density(image: Image.Image, result: RunResult, tall: int, wide: int) -> None:
    write(image, "Density by block and step", 8, LEFT)
    colours = _colours(result.report.by_step.nan_to_num(0.0))
    colours[result.report.by_step.isnan()] = torch.tensor(FAINT, dtype=torch.uint8)
    cells = colours.repeat_interleave(tall, 0).repeat_interleave(wide, 1)
    if tall > SMALL_CELL:
        cells[tall - 1 :: tall] = 255
    if wide > SMALL_CELL:
        cells[:, wide - 1 :: wide] = 255
    _paste(image, cells, TOP, LEFT)
    for row, layer in enumerate(result.report.layers.tolist()):
        if _has_label(row, tall):
            write(image, f"{layer:4d}", TOP + row * tall + (tall - 10) // 2, LEFT - 40)
    for step in range(result.report.by_step.shape[1]):
        if _has_label(step, wide):
            write(image, str(step + 1), TOP - 16, LEFT + step * wide)


def _scale(image: Image.Image, top: int) -> None:
    write(image, "0", top, LEFT)
    _paste(image, _colours(torch.linspace(0, 1, 101)).expand(10, -1, -1), top, LEFT + 16)
    write(image, "100 %", top, LEFT + 124)


def _errors(image: Image.Image, result: RunResult, tall: int, left: int) -> None:
    """Draws the mean error over the heads of each layer, by head weight, and over shapes."""
    predicted, probed = (result.report.of_layers(name) for name in ("predicted", "probed"))
    most = max([*predicted.values(), *probed.values()], default=0.0)
    if not most:
        write(image, "No head was measured", 8, left)
        return
    write(image, "Error predicted", 8, left, PREDICTED)
    write(image, "probed", 8, left + 136, PROBED)
    write(image, "0", TOP - 16, left)
    label = f"{most:.3f}"
    write(image, label, TOP - 16, left + ERROR_WIDTH - int(FONT.getlength(label)))
    bars = ImageDraw.Draw(image)
    for row, layer in enumerate(result.report.layers.tolist()):
        top = TOP + row * tall
        bottom = top + max(0, tall - 1 - (tall > SMALL_CELL))
        if layer in predicted:
            length = max(1, round(ERROR_WIDTH * predicted[layer] / most))
            bars.rectangle((left, top, left + length - 1, bottom), PREDICTED)
        if layer in probed:
            place = left + round((ERROR_WIDTH - 4) * probed[layer] / most)
            bars.rectangle((place, top, place + 3, bottom), PROBED)


def _colours(density: Tensor) -> Tensor:
    """Colours (..., 3) uint8 for densities (...)."""
    place = density.clamp(0, 1) * (len(SCALE) - 1)
    below = place.long().clamp(max=len(SCALE) - 2)
    return SCALE[below].lerp(SCALE[below + 1], (place - below).unsqueeze(-1)).round().byte()


def _paste(image: Image.Image, pixels: Tensor, top: int, left: int) -> None:
    """Pastes (height, width, 3) uint8."""
    height, width, _ = pixels.shape
    part = Image.frombytes("RGB", (width, height), bytes(pixels.contiguous().numpy().data))
    image.paste(part, (left, top))


def _tensor(image: Image.Image) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(1, image.height, image.width, 3).float() / 255


def _cell(pixels: int, count: int) -> int:
    return min(LARGEST_CELL, max(1, pixels // count))


def _has_label(index: int, cell: int) -> bool:
    return index % -(-LABEL_EVERY // cell) == 0
