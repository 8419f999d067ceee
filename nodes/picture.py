# SPDX-License-Identifier: Apache-2.0
"""Picture of the report, for the width of a node: the verdict, how much each layer computed in each
step, and the error of each layer."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..sparge.session import Report, verdict
from ..sparge.session.verdict import why_nothing

Colour = tuple[int, int, int]

PAPER, EMPTY, INK, FAINT = (24, 25, 30), (40, 42, 50), (240, 241, 244), (164, 168, 180)
PREDICTED = (82, 124, 186)
#: Colours from nothing computed to everything: what is dark was skipped.
SCALE = torch.tensor(
    [[36, 41, 92], [74, 57, 150], [158, 62, 150], [231, 98, 98], [250, 178, 92], [252, 240, 178]]
).float()

# Pixels. A node is about half as wide, so letters of 22 are 11 there.
WIDTH, MARGIN, LEFT, RIGHT, TOP, BOTTOM = 800, 24, 84, 32, 164, 124
HEIGHT, TALLEST_CELL, GAP, ERROR_WIDTH = 460, 56, 32, 180
SMALL_CELL = 16  # up to it there is no room for a gap
HEADLINE, TITLE, NUMBER = 42, 25, 22
LINE_LENGTH = 56  # characters of a message
INTERVALS = (1, 5, 10, 20, 50, 100, 200, 500)


def draw(report: Report) -> Tensor:
    """(1, height, width, 3) float32, as ComfyUI's images are."""
    found = report.densities
    by_step, layers = found.by_step, found.layers.tolist()
    if not by_step.numel() or report.counts.missing:
        return message(why_nothing(report).told or report.words.unreached)
    errors = report.errors_by_layer()
    most = max(errors.values(), default=0)
    right = WIDTH - RIGHT - (ERROR_WIDTH + GAP if most else 0)
    image = _with_map(verdict(report), by_step, layers, right)
    if most:
        box = right + GAP, TOP, WIDTH - RIGHT, image.height - BOTTOM
        _errors(image, errors, layers, most, box)
    return as_tensor(image)


def message(text: str) -> Tensor:
    """Picture that says why there is none."""
    lines = textwrap.wrap(text[:1].upper() + text[1:], LINE_LENGTH)
    image = Image.new("RGB", (WIDTH, 2 * MARGIN + 36 * len(lines)), PAPER)
    for place, line in enumerate(lines):
        write(image, line, MARGIN + 36 * place, MARGIN, INK, TITLE + 1)
    return as_tensor(image)


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


def headed(text: str, height: int) -> Image.Image:
    """New picture with a headline and, below it, a second line."""
    image = Image.new("RGB", (WIDTH, height), PAPER)
    headline, *second = text.split("\n")
    write(image, headline, 22, MARGIN, INK, _fitting(headline))
    write(image, "".join(second), 78, MARGIN, FAINT, TITLE + 3)
    return image


def _with_map(text: str, by_step: Tensor, layers: Sequence[int], right: int) -> Image.Image:
    """New picture with a headline, a map as far as `right`, and its scale."""
    height = min(HEIGHT, TALLEST_CELL * len(layers))
    image = headed(text, TOP + height + BOTTOM)
    _map(image, by_step, layers, (LEFT, TOP, right, TOP + height))
    scale(image, TOP + height + 82)
    return image


def _map(
    image: Image.Image, by_step: Tensor, layers: Sequence[int], box: tuple[int, int, int, int]
) -> None:
    left, top, right, bottom = box
    rows, steps = by_step.shape
    colours = coloured(by_step.nan_to_num(0.0))
    colours[by_step.isnan()] = torch.tensor(EMPTY, dtype=torch.uint8)
    size = right - left, bottom - top
    image.paste(from_pixels(colours).resize(size, Image.Resampling.BOX), (left, top))
    wide, tall = size[0] / steps, size[1] / rows
    lines = ImageDraw.Draw(image)
    if wide > SMALL_CELL:
        for step in range(1, steps):
            x = left + round(step * wide)
            lines.line((x, top, x, bottom), PAPER)
    if tall > SMALL_CELL:
        for row in range(1, rows):
            y = top + round(row * tall)
            lines.line((left, y, right, y), PAPER)
    write(image, "layer", top - 38, left - 12, INK, TITLE, before=1)
    every = interval(tall, 34)
    for row, layer in enumerate(layers):
        if layer % every == 0:
            write(image, str(layer), round(top + (row + 0.5) * tall) - 14, left - 12, before=1)
    every = interval(wide, 44)
    for step in range(1, steps + 1):
        if step % every == 0 or step == 1:
            write(image, str(step), bottom + 8, left + (step - 0.5) * wide, before=0.5)
    write(image, "step", bottom + 36, (left + right) / 2, INK, TITLE, before=0.5)


def scale(image: Image.Image, top: int) -> None:
    """Draws what the colours mean."""
    write(image, "skipped", top, MARGIN, INK, TITLE)
    colours = from_pixels(coloured(torch.linspace(0, 1, 180)).expand(24, -1, -1))
    left = MARGIN + round(_font(TITLE).getlength("skipped")) + 16
    image.paste(colours, (left, top + 4))
    write(image, "computed", top, left + colours.width + 16, INK, TITLE)


def _errors(
    image: Image.Image,
    errors: dict[int, float],
    layers: Sequence[int],
    most: float,
    box: tuple[int, int, int, int],
) -> None:
    """Draws the mean error over the heads of each layer, by head weight, and over shapes."""
    left, top, right, bottom = box
    tall = (bottom - top) / len(layers)
    bars = ImageDraw.Draw(image)
    for row, layer in enumerate(layers):
        above, below = round(top + row * tall), round(top + (row + 1) * tall) - 1
        below -= 1 + (tall > SMALL_CELL)
        if (error := errors.get(layer)) is not None:
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


def from_pixels(pixels: Tensor) -> Image.Image:
    """Image of (height, width, 3) uint8."""
    height, width, _ = pixels.shape
    return Image.frombytes("RGB", (width, height), bytes(pixels.contiguous().numpy().data))


def as_tensor(image: Image.Image) -> Tensor:
    """(1, height, width, 3) float32, as ComfyUI's images are."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(1, image.height, image.width, 3).float() / 255


def interval(cell: float, room: int) -> int:
    """Interval between two numbers of an axis that have so much room."""
    return next((count for count in INTERVALS if count * cell >= room), INTERVALS[-1])


def _fitting(text: str) -> int:
    """Largest size of letters in which a headline fits."""
    sizes = range(HEADLINE, NUMBER, -2)
    room = WIDTH - 2 * MARGIN
    return next((size for size in sizes if _font(size).getlength(text) <= room), NUMBER)


@functools.cache
def _font(size: int) -> Any:
    try:
        return ImageFont.load_default(size)
    except (TypeError, ImportError, OSError):  # Pillow before 10.1, or without FreeType
        return ImageFont.load_default()
