# SPDX-License-Identifier: Apache-2.0
"""The figures: error against density and PSNR against density, one line a mode.

python -m benchmarks.quality.figures --results FILE --data NAME --out DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.png import write_png
from benchmarks.quality.chart import Axis, Colour, Line, draw
from benchmarks.quality.rows import RESULTS, Row, read

#: Okabe and Ito's palette, which colour-blind readers tell apart.
COLOURS: dict[str, Colour] = {
    "drop": (213, 94, 0),
    "sol": (230, 159, 0),
    "ours manual": (86, 180, 233),
    "ours auto": (0, 114, 178),
}
DENSITY_TICKS = (0, 10, 20, 30, 40, 50)
ERROR_TICKS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
PSNR_STEP = 5


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data", required=True, help="as the rows name it")
    parser.add_argument("--out", type=Path, required=True, help="folder of the two pictures")
    options = parser.parse_args(arguments)
    rows = [row for row in read(options.results) if row["data"] == options.data]
    if not rows:
        parser.error(f"{options.results} has no rows of {options.data!r}.")
    options.out.mkdir(parents=True, exist_ok=True)
    across = Axis("density, % of query-key pairs", DENSITY_TICKS)
    for field, title, ticks, logarithmic in (
        ("rel_l2", "relative L2 error", _around(rows, "rel_l2", ERROR_TICKS), True),
        ("psnr", "PSNR, dB", _around(rows, "psnr", _decibels()), False),
    ):
        path = options.out / f"quality_{field}.png"
        up = Axis(title, ticks, logarithmic)
        write_png(path, draw(options.data, across, up, lines(rows, field)))
        print(path)


def lines(rows: Iterable[Row], field: str) -> dict[str, Line]:
    """Points (density in percent, field) of each mode that has a colour, up to the last tick."""
    points: dict[str, list[tuple[float, float]]] = {mode: [] for mode in COLOURS}
    for row in rows:
        percent = 100 * row["density"]
        if row["mode"] in points and percent <= DENSITY_TICKS[-1]:
            points[row["mode"]].append((percent, row[field]))
    return {mode: Line(sorted(found), COLOURS[mode]) for mode, found in points.items() if found}


def _around(rows: Iterable[Any], field: str, ticks: tuple[float, ...]) -> tuple[float, ...]:
    """The ticks that the values of the field lie between."""
    values = [value for line in lines(rows, field).values() for _, value in line.points]
    below = [tick for tick in ticks if tick <= min(values)]
    above = [tick for tick in ticks if tick >= max(values)]
    return tuple(tick for tick in ticks if below[-1] <= tick <= above[0])


def _decibels() -> tuple[float, ...]:
    return tuple(float(level) for level in range(0, 101, PSNR_STEP))


if __name__ == "__main__":
    main()
