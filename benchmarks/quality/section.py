# SPDX-License-Identifier: Apache-2.0
"""Tables on quality of docs/benchmarks.md, from benchmarks/results/quality.json alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.quality.rows import (
    TARGETS,
    Row,
    best_places,
    by_kernels,
    of_densities,
    of_targets,
)
from benchmarks.speed_table import table

MODES = ("drop", "sol", "ours manual", "ours auto")  # in their order in tables
SMALL_GRID = re.compile(r" \d+x\d+x\d+$")  # ends names of clips not of full size


@dataclass(frozen=True)
class Part:
    """Table of one kind of data."""

    begins: str
    """Beginning of the names of the rows' data."""
    field: str = "psnr"
    digits: int = 1


#: By name of the block in the page.
PARTS = {
    "quality-dino": Part("dino ", "rel_l2", 3),
    "quality-dit": Part("dit clips "),
    "quality-4-steps": Part("dit of 4 steps clips "),
    "quality-8-steps": Part("dit of 8 steps clips "),
    "quality-comfyui": Part("dit comfyui clips "),
    "quality-seed-1": Part("dit of seed 1 clips "),
    "quality-seed-2": Part("dit of seed 2 clips "),
    "quality-seed-3": Part("dit of seed 3 clips "),
    "quality-seed-3-short": Part("dit of seed 3 at 1,144 steps clips "),
}


def chosen(rows: Iterable[Row], part: Part) -> list[Row]:
    """Rows of mean densities of the part's data set. Where a mode ran in several places, only those
    of a GPU's kernels."""
    return best_places(_latest(of_densities(rows), part.begins))


def _latest(rows: Iterable[Row], begins: str) -> list[Row]:
    """Rows of the data so named; of several, those that entered the file last."""
    rows = list(rows)
    names = [row["data"] for row in rows if row["data"].startswith(begins)]
    names = [name for name in names if not SMALL_GRID.search(name)]
    return [row for row in rows if names and row["data"] == names[-1]]


def part_table(rows: Iterable[Row], part: Part) -> str:
    rows = chosen(rows, part)
    if len({row.get("layers") for row in rows}) > 1:
        raise ValueError(f"Rows of {rows[0]['data']} are of different layers: run them all.")
    densities = sorted({row["asked_density"] for row in rows})
    values = {(row["mode"], row["asked_density"]): row[part.field] for row in rows}
    lines = []
    for mode in MODES:
        cells = [values.get((mode, density)) for density in densities]
        if any(cell is not None for cell in cells):
            lines.append([mode, *("" if c is None else f"{c:.{part.digits}f}" for c in cells)])
    header = [f"{rows[0]['data']}, asked density", *(f"{100 * d:g} %" for d in densities)]
    return table(header, lines) + _places(rows)


def targets_table(rows: Iterable[Row], part: Part) -> str:
    """Table of the node's own targets."""
    rows = _latest(of_targets(rows), part.begins)
    found = {row["target"]: row for row in sorted(rows, key=by_kernels)}
    shown = {name: found[target] for name, target in TARGETS.items() if target in found}
    header = [
        f"{rows[0]['data']}, quality",
        "target error",
        "density",
        "PSNR, dB",
        "error reached (worst clip)",
    ]
    lines = [
        [
            name,
            f"{row['target']:g}",
            _percent(row["density"]),
            f"{row['psnr']:.1f}",
            f"{row['mean_error']:.3f} ({row['worst_mean_error']:.3f})",
        ]
        for name, row in shown.items()
    ]
    return table(header, lines) + _places(list(shown.values()))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _places(rows: list[Row]) -> str:
    """Paragraph on the places at which each mode ran, and the commits."""
    modes: dict[str, dict[str, None]] = {}
    for row in rows:
        modes.setdefault(row["where"], {})[row["mode"]] = None
    places = "; ".join(f"{where}: {', '.join(named)}" for where, named in modes.items())
    return f"\n{places}; commit {', '.join(dict.fromkeys(row['commit'] for row in rows))}.\n"
