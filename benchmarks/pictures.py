# SPDX-License-Identifier: Apache-2.0
"""Pictures of docs/benchmarks.md: milliseconds, errors and decibels against density."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.limits import Rates
from benchmarks.quality.rows import Row, best_places, of_densities
from benchmarks.speed_table import DENSITIES, OURS, SPARSE_PEER, TITLES, Speeds

#: (density in percent, value) by the name of the line.
Lines = dict[str, list[tuple[float, float]]]

#: Okabe and Ito's palette, which colour-blind readers tell apart.
COLOURS = {
    "drop": "#d55e00",
    "sol": "#e69f00",
    "ours manual": "#56b4e9",
    "ours auto": "#0072b2",
    "sol attn": "#d55e00",
    "ours": "#0072b2",
    "limit": "#000000",
}
DENSE_PEER = "#e69f00"
UP = {"rel_l2": "relative L2 error", "psnr": "PSNR, dB", "ms": "milliseconds"}
MOST_DENSITY = 60  # per cent, of a picture of quality


def speed_lines(speeds: Speeds, rates: Rates) -> Lines:
    """Lines of a picture: the fastest dense peer at every density, for it knows none; the sparse
    peer; ours with everything on; the limit."""
    dense = speeds.fastest_dense_peer()
    found: dict[str, list[float | None]] = {}
    if dense:
        found[dense.split()[-1]] = [speeds.ms(dense, 1.0)] * len(DENSITIES)
    found["sol attn"] = [speeds.ms(SPARSE_PEER, density) for density in DENSITIES]
    found["ours"] = [speeds.ms(OURS, density) for density in DENSITIES]
    found["limit"] = [speeds.limit(OURS, density, rates) for density in DENSITIES]
    lines = {
        name: sorted((100 * d, ms) for d, ms in zip(DENSITIES, values, strict=True) if ms)
        for name, values in found.items()
    }
    return {name: points for name, points in lines.items() if points}


def quality_lines(rows: Iterable[Row], field: str) -> Lines:
    """Points of each mode that has a colour; one for each asked density, from the kernels where
    they ran."""
    found: dict[str, dict[float, tuple[float, float]]] = {mode: {} for mode in COLOURS}
    for row in best_places(of_densities(rows)):
        percent = 100 * row["density"]
        if row["mode"] in found and percent <= MOST_DENSITY:
            found[row["mode"]][row["asked_density"]] = (percent, row[field])
    return {mode: sorted(points.values()) for mode, points in found.items() if points}


def draw(path: Path, title: str, field: str, lines: Mapping[str, Sequence]) -> None:
    """Draws the lines with a legend, on a logarithmic axis but for decibels."""
    # Here, since only those who draw need it.
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), "o-", color=COLOURS.get(name, DENSE_PEER), label=name)
    if field != "psnr":
        axes.set_yscale("log")
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(ScalarFormatter())
    axes.set(title=title, xlabel="density, % of query-key pairs", ylabel=UP[field], xlim=(0, None))
    axes.grid(which="both", color="#e1e1e1")
    axes.legend()
    figure.savefig(path, metadata={"Software": None})


def picture_name(shape: str) -> str:
    return f"speed_{shape}.png"


def draw_speed(folder: Path, speeds: Iterable[Speeds], rates: Rates) -> None:
    for each in speeds:
        path = folder / picture_name(each.shape)
        draw(path, TITLES[each.shape], "ms", speed_lines(each, rates))
