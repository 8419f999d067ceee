# SPDX-License-Identifier: Apache-2.0
"""Picture of the report, for the width of a node: the verdict, how much each layer computed in each
step, and the error of each layer. Pictures are ComfyUI's: (1, height, width, 3) float32."""

from __future__ import annotations

import functools
import math
import textwrap
from typing import Any

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..sparge.session import Report, verdict
from ..sparge.session.verdict import why_nothing

Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]

PAPER, EMPTY, INK, FAINT = (24, 25, 30), (40, 42, 50), (240, 241, 244), (164, 168, 180)
PREDICTED = (82, 124, 186)
#: Colours from nothing computed to everything: what is dark was skipped.
SCALE = torch.tensor(
    [[36, 41, 92], [74, 57, 150], [158, 62, 150], [231, 98, 98], [250, 178, 92], [252, 240, 178]]
).float()

# Pixels. A node is about half as wide, so letters of 22 are 11 there.
WIDTH, MARGIN, LEFT, RIGHT, TOP, BOTTOM = 800, 24, 84, 32, 164, 124
HEIGHT, TALLEST_CELL, GAP, ERROR_WIDTH = 460, 56, 32, 180
HEADLINE, TITLE, NUMBER = 36, 25, 22
LINE_LENGTH = 56  # characters of a message


def draw(report: Report) -> Tensor:
    by_step, layers = report.densities.by_step, report.densities.layers.tolist()
    if not by_step.numel() or report.counts.missing:
        return message(why_nothing(report).told or report.words.unreached)
    errors = report.errors_by_layer()
    most = max(errors.values(), default=0)
    right = WIDTH - RIGHT - (ERROR_WIDTH + GAP if most else 0)
    bottom = TOP + min(HEIGHT, TALLEST_CELL * len(layers))
    image = Image.new("RGB", (WIDTH, bottom + BOTTOM), PAPER)
    headline, *second = verdict(report).split("\n")
    write(image, headline, 22, MARGIN, INK, HEADLINE)
    write(image, "".join(second), 78, MARGIN, FAINT, TITLE + 3)
    _map(image, by_step, layers, (LEFT, TOP, right, bottom))
    _scale(image, bottom + 82)
    if most:
        bars = [errors.get(layer, 0.0) for layer in layers]
        _errors(image, bars, most, (right + GAP, TOP, WIDTH - RIGHT, bottom))
    return _as_tensor(image)


def message(text: str) -> Tensor:
    """Picture that says why there is none."""
    lines = textwrap.wrap(text[:1].upper() + text[1:], LINE_LENGTH)
    image = Image.new("RGB", (WIDTH, 2 * MARGIN + 36 * len(lines)), PAPER)
    for place, line in enumerate(lines):
        write(image, line, MARGIN + 36 * place, MARGIN, INK, TITLE + 1)
    return _as_tensor(image)


def write(
    image: Image.Image,
    text: str,
    top: int,
    left: float,
    colour: Colour = FAINT,
    size: int = NUMBER,
    before: float = 0.0,
) -> None:
    """Writes a line of text. before: share of its length that stands left of `left`."""
    font = _font(size)
    at = left - before * font.getlength(text), top
    ImageDraw.Draw(image).text(at, text, colour, font)


def _map(image: Image.Image, by_step: Tensor, layers: list[int], box: Box) -> None:
    left, top, right, bottom = box
    rows, steps = by_step.shape
    colours = coloured(by_step.nan_to_num(0.0))
    colours[by_step.isnan()] = torch.tensor(EMPTY, dtype=torch.uint8)
    size = right - left, bottom - top
    cells = Image.fromarray(colours.numpy())
    image.paste(cells.resize(size, Image.Resampling.BOX), (left, top))
    wide, tall = size[0] / steps, size[1] / rows
    write(image, "layer", top - 38, left - 12, INK, TITLE, before=1)
    for row, layer in enumerate(layers):
        if layer % math.ceil(34 / tall) == 0:
            write(image, str(layer), round(top + (row + 0.5) * tall) - 14, left - 12, before=1)
    for step in range(0, steps, math.ceil(44 / wide)):
        write(image, str(step + 1), bottom + 8, left + (step + 0.5) * wide, before=0.5)
    write(image, "step", bottom + 36, (left + right) / 2, INK, TITLE, before=0.5)


def _scale(image: Image.Image, top: int) -> None:
    """Draws what the colours mean."""
    write(image, "skipped", top, MARGIN, INK, TITLE)
    colours = Image.fromarray(coloured(torch.linspace(0, 1, 180)).repeat(24, 1, 1).numpy())
    left = MARGIN + round(_font(TITLE).getlength("skipped")) + 16
    image.paste(colours, (left, top + 4))
    write(image, "computed", top, left + colours.width + 16, INK, TITLE)


def _errors(image: Image.Image, errors: list[float], most: float, box: Box) -> None:
    """Draws the mean error over the heads of each layer, by head weight, and over shapes."""
    left, top, right, bottom = box
    tall, bars = (bottom - top) / len(errors), ImageDraw.Draw(image)
    for row, error in enumerate(errors):
        above, below = round(top + row * tall), round(top + (row + 1) * tall) - 2
        if error:
            length = max(1, round((right - left) * error / most))
            bars.rectangle((left, above, left + length, max(above, below)), PREDICTED)
    write(image, "0", bottom + 8, left)
    write(image, f"{100 * most:.2g} %", bottom + 8, right, before=1)
    write(image, "error", bottom + 36, (left + right) / 2, INK, TITLE, before=0.5)


def coloured(density: Tensor) -> Tensor:
    """Colours (..., 3) uint8 for densities (...)."""
    place = density.clamp(0, 1) * (len(SCALE) - 1)
    below = place.long().clamp(max=len(SCALE) - 2)
    return SCALE[below].lerp(SCALE[below + 1], (place - below).unsqueeze(-1)).round().byte()


def _as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(numpy.array(image))[None].float() / 255


@functools.cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)
