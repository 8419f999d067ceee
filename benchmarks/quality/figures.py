# SPDX-License-Identifier: Apache-2.0
"""The figures: error against density and PSNR against density, one line a mode.

python -m benchmarks.quality.figures --out DIR --error "dino clip 0" --psnr "dit clips 0-1"

From the rows that `benchmarks.quality` wrote; where a mode has rows of several places, those of a
GPU's kernels count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks.png import write_png
from benchmarks.quality.chart import Axis, Colour, Line, draw
from benchmarks.quality.rows import EMULATION, REFERENCE, RESULTS, Row, read

#: Okabe and Ito's palette, which colour-blind readers tell apart.
COLOURS: dict[str, Colour] = {
    "drop": (213, 94, 0),
    "sol": (230, 159, 0),
    "ours manual": (86, 180, 233),
    "ours auto": (0, 114, 178),
}
DENSITY_TICKS = (0, 10, 20, 30, 40, 50, 60)
ERROR_TICKS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
DECIBEL_TICKS = tuple(float(level) for level in range(0, 101, 5))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--error", help="data, as the rows name it, of the first picture")
    parser.add_argument("--psnr", help="data of the second")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    options = parser.parse_args(arguments)
    rows = read(options.results)
    pictures = [
        ("rel_l2", "relative L2 error", ERROR_TICKS, True, options.error),
        ("psnr", "PSNR, dB", DECIBEL_TICKS, False, options.psnr),
    ]
    wanted = [picture for picture in pictures if picture[-1]]
    if not wanted:
        parser.error("Name the data of a picture with --error, --psnr, or both.")
    across = Axis("density, % of query-key pairs", DENSITY_TICKS)
    for field, title, ticks, logarithmic, data in wanted:
        drawn = lines((row for row in rows if row["data"] == data), field)
        if not drawn:
            names = sorted({row["data"] for row in rows})
            parser.error(f"{options.results} has no rows of {data!r} to draw, but of {names}.")
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"quality_{field}.png"
        up = Axis(title, _around(drawn.values(), ticks), logarithmic)
        write_png(path, draw(data, across, up, drawn))
        print(path)


def lines(rows: Iterable[Row], field: str) -> dict[str, Line]:
    """Points (density in percent, field) of each mode that has a colour, up to the last tick; one
    for each asked density, from the kernels where they ran."""
    points: dict[str, dict[float, tuple[float, float]]] = {mode: {} for mode in COLOURS}
    for row in sorted(rows, key=_by_kernels):
        percent = 100 * row["density"]
        if row["mode"] in points and percent <= DENSITY_TICKS[-1]:
            points[row["mode"]][row["asked_density"]] = (percent, row[field])
    return {
        mode: Line(sorted(found.values()), COLOURS[mode]) for mode, found in points.items() if found
    }


def _by_kernels(row: Row) -> bool:
    return row["where"] not in (EMULATION, REFERENCE)


def _around(drawn: Iterable[Line], ticks: tuple[float, ...]) -> tuple[float, ...]:
    """The ticks that the lines lie between."""
    values = [value for line in drawn for _, value in line.points]
    below = [tick for tick in ticks if tick <= min(values)]
    above = [tick for tick in ticks if tick >= max(values)]
    return tuple(tick for tick in ticks if below[-1] <= tick <= above[0])


if __name__ == "__main__":
    main()
