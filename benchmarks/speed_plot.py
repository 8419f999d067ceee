# SPDX-License-Identifier: Apache-2.0
"""Pictures of milliseconds against density, one for each shape with a table of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .limits import DENSITIES, Ceilings
from .quality.chart import Axis, Colour, Line, draw
from .speed_table import OURS, PLAIN, SPARSE_PEER, TITLES, Row, Speeds

#: Okabe and Ito's palette, which colour-blind readers tell apart.
BLACK, ORANGE, BLUE, VERMILION = (0, 0, 0), (230, 159, 0), (0, 114, 178), (213, 94, 0)
DENSITY_TICKS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
STEPS = (1, 2, 5)  # of a logarithmic axis, times powers of ten


def pictures(rows: Sequence[Row], most: Ceilings | None) -> dict[str, Tensor]:
    """Pictures (height, width, 3) uint8 by shape."""
    shown = (Speeds.of(rows, shape) for shape in TITLES)
    return {speeds.shape: picture(speeds, most) for speeds in shown if speeds.cells}


def picture_name(shape: str) -> str:
    return f"speed_{shape}.png"


def picture(speeds: Speeds, most: Ceilings | None) -> Tensor:
    drawn = lines(speeds, most)
    values = [ms for line in drawn.values() for _, ms in line.points]
    up = Axis("milliseconds", ticks(min(values), max(values)), logarithmic=True)
    return draw(speeds.shape, Axis("density, %", DENSITY_TICKS), up, drawn)


def lines(speeds: Speeds, most: Ceilings | None) -> dict[str, Line]:
    """Lines of a picture: the fastest dense peer at every density, for it knows none; ours with
    everything on, where that was measured; the sparse peer; the limit."""
    ours = OURS if any(peer == OURS for peer in speeds.peers) else PLAIN
    found: dict[str, Line] = {}

    def add(name: str, colour: Colour, values: Sequence[float | None]) -> None:
        pairs = zip(DENSITIES, values, strict=True)
        points = [(100 * density, ms) for density, ms in pairs if ms is not None]
        if points:
            found[name] = Line(sorted(points), colour)

    dense = speeds.fastest_dense_peer()
    if dense:
        add(dense.split()[-1].replace("_", " "), ORANGE, [speeds.ms(dense, 1.0)] * len(DENSITIES))
    add("sol attn", VERMILION, [speeds.ms(SPARSE_PEER, density) for density in DENSITIES])
    add("ours", BLUE, [speeds.ms(ours, density) for density in DENSITIES])
    if most is not None:
        add("limit", BLACK, [speeds.limit(ours, density, most) for density in DENSITIES])
    return found


def ticks(low: float, high: float) -> tuple[float, ...]:
    """Ticks 1, 2, 5, 10 ...: from the last at or below `low` to the first at or above `high`."""
    steps = [step * 10.0**power for power in range(-4, 7) for step in STEPS]
    first = max(step for step in steps if step <= low)
    last = min(step for step in steps if step >= high and step > first)
    return tuple(step for step in steps if first <= step <= last)
