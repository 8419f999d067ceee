# SPDX-License-Identifier: Apache-2.0
"""Picture of a graph for the template browser, whose cards are 256 pixels square: the model, what
comes of it, how large, and that most of its attention is skipped."""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from .graph import Graph

SIDE, EDGE = 512, 28
BACKGROUND, WHITE, GREY = (22, 26, 30), (240, 243, 245), (168, 178, 186)
GREEN, DARK_GREEN = (116, 201, 146), (31, 61, 43)
FRAME, BACK = (58, 74, 88), (38, 48, 57)
#: Top and height of the diagram: the card lays a label over the left of what is above it.
TOP, HEIGHT = 64, 184
#: Frames of a clip for each sheet of the stack.
FRAMES_A_SHEET = 20
COLUMNS = 12

Box = tuple[float, float, float, float]


def draw(graph: Graph, path: Path) -> None:
    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    pen = ImageDraw.Draw(image)
    _text(pen, 262, graph.model, WHITE, 54)
    _text(pen, 334, graph.task, WHITE, 38)
    _text(pen, 384, graph.size, GREY, 32)
    pen.rectangle((0, SIDE - 76, SIDE, SIDE), fill=DARK_GREEN)
    _text(pen, SIDE - 58, "Sparge Attention", GREEN, 36)
    found = re.search(r"(\d+)x(\d+)(?:, (\d+) frames)?", graph.name)
    aspect = int(found[1]) / int(found[2]) if found else 16 / 9
    sheets = 1 + int(found[3] or 0) // FRAMES_A_SHEET if found else 1
    if graph.task == "image to video":
        _sheets(pen, _fit(aspect, EDGE, 170), 1)
        _arrow(pen, 212, 258)
        _blocks(pen, _sheets(pen, _fit(aspect, 272, SIDE - EDGE - 272), sheets))
    elif not found:  # the comparison
        half = (SIDE - 3 * EDGE) / 2
        _blocks(pen, _sheets(pen, _fit(aspect, EDGE, half), 1), every=1)
        _blocks(pen, _sheets(pen, _fit(aspect, 2 * EDGE + half, half), 1))
    else:
        _blocks(pen, _sheets(pen, _fit(aspect, 84, SIDE - 168), sheets))
    image.save(path, quality=90)


def _text(pen: ImageDraw.ImageDraw, y: float, text: str, color: tuple, size: int) -> None:
    """Centred, and smaller where it is too wide."""
    while pen.textlength(text, font=ImageFont.load_default(size)) > SIDE - EDGE:
        size -= 1
    pen.text((SIDE / 2, y), text, fill=color, font=ImageFont.load_default(size), anchor="ma")


def _fit(aspect: float, left: float, width: float) -> Box:
    """The largest frame of that aspect in a part of the diagram, centred."""
    wide = min(width, HEIGHT * aspect)
    x, y = left + (width - wide) / 2, TOP + (HEIGHT - wide / aspect) / 2
    return x, y, x + wide, y + wide / aspect


def _sheets(pen: ImageDraw.ImageDraw, box: Box, sheets: int) -> Box:
    """A stack of frames within the box; returns the one in front."""
    step = 7
    behind = step * (sheets - 1)
    shrunk = 1 - behind / (box[2] - box[0])
    width, height = (box[2] - box[0]) * shrunk, (box[3] - box[1]) * shrunk
    for sheet in reversed(range(sheets)):
        x, y = box[0] + step * sheet, box[1] + step * (sheets - 1 - sheet) * height / width
        place = (x, y, x + width, y + height)
        pen.rectangle(place, fill=BACK if sheet else FRAME, outline=BACKGROUND, width=2)
    return place


def _blocks(pen: ImageDraw.ImageDraw, box: Box, every: int = 5) -> None:
    """Blocks of attention over a frame: green is computed, about one in `every`."""
    size = (box[2] - box[0]) / COLUMNS
    for row in range(int((box[3] - box[1]) / size)):
        for column in range(COLUMNS):
            near = abs(row * COLUMNS * size / (box[3] - box[1]) - column) < 1.5
            if every == 1 or near or (row * 7 + column * 5) % (2 * every) == 0:
                x, y = box[0] + column * size + 2, box[1] + row * size + 2
                pen.rectangle((x, y, x + size - 4, y + size - 4), fill=GREEN)


def _arrow(pen: ImageDraw.ImageDraw, left: float, right: float) -> None:
    middle = TOP + HEIGHT / 2
    pen.line((left, middle, right - 8, middle), fill=WHITE, width=5)
    pen.polygon(((right, middle), (right - 16, middle - 11), (right - 16, middle + 11)), fill=WHITE)
