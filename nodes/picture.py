# SPDX-License-Identifier: Apache-2.0
"""Picture of the report: density by layer and step on the left, error by layer on the right."""

from __future__ import annotations

import textwrap

import torch
from torch import Tensor

from ..sparge.common.glyphs import write
from ..sparge.tune import mean_error
from .result import RunResult
from .verdict import why_nothing

Colour = tuple[float, float, float]

PAPER, INK, FAINT = (1.0, 1.0, 1.0), (0.15, 0.15, 0.18), (0.88, 0.88, 0.90)
PREDICTED, PROBED = (0.35, 0.55, 0.85), (0.85, 0.30, 0.15)
#: Colours from nothing computed to everything: bright is fast, dark is dense.
SCALE = torch.tensor(
    [[0.99, 0.91, 0.55], [0.55, 0.82, 0.50], [0.16, 0.55, 0.57], [0.20, 0.22, 0.46]]
)

LEFT, TOP, GAP, BOTTOM, RIGHT = 56, 48, 48, 40, 24
MAP_WIDTH, ERROR_WIDTH, HEIGHT = 560, 240, 480
LARGEST_CELL, SMALL_CELL = 40, 6  # up to the small one there is no room for a gap
LINE_LENGTH, LINE_HEIGHT = 100, 16  # of a message
LABEL_EVERY = 24  # pixels between two numbers of an axis


class Canvas:
    """(height, width, 3) float32, 0 to 1."""

    def __init__(self, height: int, width: int) -> None:
        self.pixels = torch.tensor(PAPER).expand(height, width, 3).clone()

    def paste(self, image: Tensor, top: int, left: int) -> None:
        area = self.pixels[top : top + image.shape[0], left : left + image.shape[1]]
        area[:] = image

    def bar(self, top: int, left: int, height: int, width: int, colour: Colour) -> None:
        self.paste(torch.tensor(colour).expand(max(1, height), max(1, width), 3), top, left)

    def write(self, text: str, top: int, left: int, colour: Colour = INK) -> None:
        points = write(text)
        area = self.pixels[top : top + points.shape[0], left : left + points.shape[1]]
        area[points[: area.shape[0], : area.shape[1]]] = torch.tensor(colour)


def draw(result: RunResult) -> Tensor:
    """(1, height, width, 3) float32, as ComfyUI's images are."""
    layers, steps = result.by_step.shape
    if not layers or not steps or result.tally.missing:
        return message(why_nothing(result) or "no self-attention of a whole grid reached this node")
    cell = (_cell(HEIGHT, layers), _cell(MAP_WIDTH, steps))
    height, map_width = max(layers * cell[0], 120), max(steps * cell[1], 240)
    right = LEFT + map_width + GAP
    canvas = Canvas(TOP + height + BOTTOM, right + ERROR_WIDTH + RIGHT)
    _density(canvas, result, cell)
    _scale(canvas, TOP + height + 22)
    _errors(canvas, result, cell[0], right)
    return canvas.pixels.unsqueeze(0)


def message(text: str) -> Tensor:
    """Picture that says why there is none."""
    lines = textwrap.wrap(text, LINE_LENGTH)
    points = write(max(lines, key=len)).shape[1]
    canvas = Canvas(48 + LINE_HEIGHT * len(lines), points + 32)
    for place, line in enumerate(lines):
        canvas.write(line, 27 + LINE_HEIGHT * place, 16)
    return canvas.pixels.unsqueeze(0)


def _density(canvas: Canvas, result: RunResult, cell: tuple[int, int]) -> None:
    canvas.write("DENSITY BY BLOCK AND STEP", 8, LEFT)
    tall, wide = cell
    canvas.paste(_cells(result.by_step, tall, wide), TOP, LEFT)
    for row, layer in enumerate(result.layers.tolist()):
        if _has_label(row, tall):
            canvas.write(f"{layer:4d}", TOP + row * tall + (tall - 10) // 2, LEFT - 40)
    for step in range(result.by_step.shape[1]):
        if _has_label(step, wide):
            canvas.write(str(step + 1), TOP - 16, LEFT + step * wide)


def _cells(density: Tensor, tall: int, wide: int) -> Tensor:
    """(layers * tall, steps * wide, 3), with a gap between cells that are large enough for one."""
    colours = _colours(density.nan_to_num(0.0))
    colours[density.isnan()] = torch.tensor(FAINT)
    image = colours.repeat_interleave(tall, 0).repeat_interleave(wide, 1)
    if tall > SMALL_CELL:
        image[tall - 1 :: tall] = torch.tensor(PAPER)
    if wide > SMALL_CELL:
        image[:, wide - 1 :: wide] = torch.tensor(PAPER)
    return image


def _scale(canvas: Canvas, top: int) -> None:
    canvas.write("0", top, LEFT)
    canvas.paste(_colours(torch.linspace(0, 1, 101)).expand(10, -1, -1), top, LEFT + 16)
    canvas.write("100 %", top, LEFT + 124)


def _errors(canvas: Canvas, result: RunResult, tall: int, left: int) -> None:
    """Draws the mean error over the heads of each layer, by head weight, and over shapes."""
    predicted, probed = _by_layer(result, "predicted"), _by_layer(result, "probed")
    most = max([*predicted.values(), *probed.values()], default=0.0)
    if not most:
        canvas.write("NO HEAD WAS MEASURED", 8, left)
        return
    canvas.write("ERROR PREDICTED", 8, left, PREDICTED)
    canvas.write("PROBED", 8, left + 136, PROBED)
    canvas.write("0", TOP - 16, left)
    label = f"{most:.3f}"
    canvas.write(label, TOP - 16, left + ERROR_WIDTH - write(label).shape[1])
    for row, layer in enumerate(result.layers.tolist()):
        top = TOP + row * tall
        if layer in predicted:
            length = round(ERROR_WIDTH * predicted[layer] / most)
            canvas.bar(top, left, tall - (tall > SMALL_CELL), length, PREDICTED)
        if layer in probed:
            place = round((ERROR_WIDTH - 4) * probed[layer] / most)
            canvas.bar(top, left + place, tall - (tall > SMALL_CELL), 4, PROBED)


def _by_layer(result: RunResult, name: str) -> dict[int, float]:
    found: dict[int, list[Tensor]] = {}
    for shape in result.report.shapes:
        heads = torch.stack([getattr(shape, name), shape.head_weight])
        for place, layer in enumerate(shape.layers.tolist()):
            found.setdefault(layer, []).append(heads[:, place])
    means = {layer: mean_error(*torch.cat(heads, 1)) for layer, heads in found.items()}
    return {layer: mean for layer, mean in means.items() if mean is not None}


def _colours(density: Tensor) -> Tensor:
    """Colours (..., 3) for densities (...)."""
    place = density.clamp(0, 1) * (len(SCALE) - 1)
    below = place.long().clamp(max=len(SCALE) - 2)
    return torch.lerp(SCALE[below], SCALE[below + 1], (place - below).unsqueeze(-1))


def _cell(pixels: int, count: int) -> int:
    return min(LARGEST_CELL, max(1, pixels // count))


def _has_label(index: int, cell: int) -> bool:
    return index % -(-LABEL_EVERY // cell) == 0
