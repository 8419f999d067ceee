# SPDX-License-Identifier: Apache-2.0
"""Figures of docs/benchmarks.md, error against density and PSNR against density, and its tables.

python -m benchmarks.quality.figures
python -m benchmarks.quality.figures --out DIR --error "dino clip 0" --psnr "dit clips 0-1"

They come from the rows that `benchmarks.quality` wrote; where a mode has rows of several places,
those of a GPU's kernels count. The first form rewrites the page's section and the pictures beside
the rows; the second draws any data.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from benchmarks.png import write_png
from benchmarks.quality.chart import Axis, Colour, Line, draw
from benchmarks.quality.rows import RESULTS, Row, of_densities, read
from benchmarks.quality.section import BEGIN, END, PARTS, best_places, chosen, section
from benchmarks.timing import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
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
ACROSS = "density, % of query-key pairs"
#: Title, ticks, and whether they are spaced by their logarithms, by the rows' field.
UP = {
    "rel_l2": ("relative L2 error", ERROR_TICKS, True),
    "psnr": ("PSNR, dB", DECIBEL_TICKS, False),
}
OPTION = {"rel_l2": "error", "psnr": "psnr"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--error", help="data, as the rows name it, of an error picture")
    parser.add_argument("--psnr", help="data of a PSNR picture")
    parser.add_argument("--out", type=Path, help="folder of those pictures")
    options = parser.parse_args(arguments)
    rows = read(options.results)
    wanted = [(field, data) for field in UP if (data := getattr(options, OPTION[field]))]
    if bool(wanted) != bool(options.out):
        parser.error("Pictures of other data take --out and --error, --psnr, or both.")
    if not wanted:
        PAGE.write_text(page(rows), encoding="utf-8")
        for name, pixels in shown(rows).items():
            write_png(RESULTS.with_name(name), pixels)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for field, data in wanted:
        found = [row for row in rows if row["data"] == data]
        if not lines(found, field):
            names = sorted({row["data"] for row in rows})
            parser.error(f"{options.results} has no rows of {data!r} to draw, but of {names}.")
        path = options.out / f"quality_{field}.png"
        write_png(path, picture(found, field))
        print(path)


def page(rows: list[Row]) -> str:
    """Text of the page with the section that these rows make."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + section(rows) + END + rest.split(END)[1]


def shown(rows: list[Row]) -> dict[str, Tensor]:
    """Pictures of the page by file name."""
    return {
        part.picture: picture(found, part.field)
        for part in PARTS
        if part.picture and (found := chosen(rows, part))
    }


def picture(rows: list[Row], field: str) -> Tensor:
    """(height, width, 3) uint8: the picture of the rows of one data set."""
    drawn = lines(rows, field)
    title, ticks, logarithmic = UP[field]
    up = Axis(title, _around(drawn.values(), ticks), logarithmic)
    return draw(rows[0]["data"], Axis(ACROSS, DENSITY_TICKS), up, drawn)


def lines(rows: Iterable[Row], field: str) -> dict[str, Line]:
    """Points (density in percent, field) of each mode that has a colour, up to the last tick; one
    for each asked density, from the kernels where they ran."""
    points: dict[str, dict[float, tuple[float, float]]] = {mode: {} for mode in COLOURS}
    for row in best_places(of_densities(rows)):
        percent = 100 * row["density"]
        if row["mode"] in points and percent <= DENSITY_TICKS[-1]:
            points[row["mode"]][row["asked_density"]] = (percent, row[field])
    return {
        mode: Line(sorted(found.values()), COLOURS[mode]) for mode, found in points.items() if found
    }


def _around(drawn: Iterable[Line], ticks: tuple[float, ...]) -> tuple[float, ...]:
    """Ticks that the lines lie between."""
    values = [value for line in drawn for _, value in line.points]
    below = [tick for tick in ticks if tick <= min(values)]
    above = [tick for tick in ticks if tick >= max(values)]
    return tuple(tick for tick in ticks if below[-1] <= tick <= above[0])


if __name__ == "__main__":
    main()
