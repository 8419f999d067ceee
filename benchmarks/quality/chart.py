# SPDX-License-Identifier: Apache-2.0
"""A line chart as pixels, with nothing but torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sparge.common.glyphs import write

Point = tuple[float, float]
Colour = tuple[int, int, int]

WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 110, 30, 90, 80
INK, GRID = (60, 60, 60), (225, 225, 225)
TITLE_Y, LEGEND_Y, LEGEND_STEP = 26, 60, 200  # above the lines, so that it covers none
ZOOM = 2  # of the 5 x 7 letters: 14 pixels high


@dataclass(frozen=True)
class Axis:
    title: str
    ticks: Sequence[float]
    """The first and the last are the ends of the axis."""
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """0 at the first tick, 1 at the last."""
        low, high, value = (
            math.log(x) if self.logarithmic else x for x in (self.ticks[0], self.ticks[-1], value)
        )
        return (value - low) / (high - low)


@dataclass(frozen=True)
class Line:
    points: Sequence[Point]
    colour: Colour


def draw(title: str, across: Axis, up: Axis, lines: Mapping[str, Line]) -> Tensor:
    """(HEIGHT, WIDTH, 3) uint8: the lines by name, with a legend. Points lie within the axes."""
    chart = torch.full((HEIGHT, WIDTH, 3), 255.0)

    def at(x: float, y: float) -> Point:
        return (
            LEFT + across.place(x) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up.place(y) * (HEIGHT - TOP - BOTTOM),
        )

    for tick in across.ticks:
        x, bottom = at(tick, up.ticks[0])
        _stroke(chart, (x, bottom), at(tick, up.ticks[-1]), GRID, 1)
        _text(chart, f"{tick:g}", x, bottom + 20, INK, anchor=0.5)
    for tick in up.ticks:
        left, y = at(across.ticks[0], tick)
        _stroke(chart, (left, y), at(across.ticks[-1], tick), GRID, 1)
        _text(chart, f"{tick:g}", left - 12, y, INK, anchor=1.0)
    _text(chart, across.title, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 22, INK, anchor=0.5)
    _text(chart, f"{title} - {up.title}", LEFT, TITLE_Y, INK)

    for place_in_legend, (name, line) in enumerate(lines.items()):
        places = [at(*point) for point in line.points]
        for start, end in pairwise(places):
            _stroke(chart, start, end, line.colour, 3)
        for place in places:
            _stroke(chart, place, place, line.colour, 10)
        x = LEFT + LEGEND_STEP * place_in_legend
        _stroke(chart, (x, LEGEND_Y), (x + 30, LEGEND_Y), line.colour, 3)
        _text(chart, name, x + 45, LEGEND_Y, INK)
    return chart.round().byte()


def _stroke(chart: Tensor, start: Point, end: Point, colour: Colour, width: float) -> None:
    """A line with round ends, its edge blended over a pixel; a dot where it has no length."""
    columns, rows = (_span(a, b, width / 2 + 1) for a, b in zip(start, end, strict=True))
    part = chart[rows.start : rows.stop, columns.start : columns.stop]
    x = torch.tensor(columns) + 0.5 - start[0]
    y = (torch.tensor(rows) + 0.5 - start[1]).unsqueeze(1)
    across, down = end[0] - start[0], end[1] - start[1]
    length = across**2 + down**2
    along = ((x * across + y * down) / length).clamp(0, 1) if length else torch.zeros(())
    distance = torch.hypot(x - along * across, y - along * down)
    cover = ((width + 1) / 2 - distance).clamp(0, 1).unsqueeze(-1)
    part += cover * (torch.tensor(colour, dtype=torch.float32) - part)


def _span(start: float, end: float, reach: float) -> range:
    """Pixels from one place to the other and a little beyond."""
    return range(int(min(start, end) - reach), int(max(start, end) + reach) + 1)


def _text(
    chart: Tensor, text: str, x: float, y: float, colour: Colour, anchor: float = 0.0
) -> None:
    """Centred on y; x is where its left end (anchor 0), middle (0.5) or right end (1) goes."""
    points = write(text, ZOOM)
    top, left = round(y - points.shape[0] / 2), round(x - anchor * points.shape[1])
    part = chart[top : top + points.shape[0], left : left + points.shape[1]]
    part[points] = torch.tensor(colour, dtype=torch.float32)
