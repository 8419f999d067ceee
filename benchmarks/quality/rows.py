# SPDX-License-Identifier: Apache-2.0
"""Results file: a JSON object a line for each data set, mode, place, and asked density or
target."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.timing import ROOT
from sparge.session import QUALITIES

RESULTS = ROOT / "benchmarks" / "results" / "quality.json"
KEY = ("data", "mode", "where", "asked_density", "target")  # a row has one of the last two
DIGITS = 6
EMULATION, REFERENCE = "emulation", "reference"  # values of `where` that are no GPU
#: Target errors of mode auto quality.
TARGETS = QUALITIES
#: Name of that mode in rows; `ours auto` is a mean density.
AUTO_QUALITY = "ours auto quality"

#: Row: the fields of `summary` in judge.py or of `Clips`, KEY and commit.
Row = dict[str, Any]


def read(path: Path = RESULTS) -> list[Row]:
    """Reads the rows; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[Row]) -> None:
    """Adds rows; those of the same KEY give way.

    Raises:
        ValueError: a figure is not finite, so that something before went wrong.
    """
    found = {
        tuple(row.get(name) for name in KEY): row for row in [*read(path), *map(_rounded, rows)]
    }
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in found.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def of_densities(rows: Iterable[Row]) -> list[Row]:
    """Rows that say what a mean density gives."""
    return [row for row in rows if "asked_density" in row]


def of_targets(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "target" in row]


def best_places(rows: Iterable[Row]) -> list[Row]:
    """One row for each mode and asked density, from the kernels where they ran."""
    found = {(row["mode"], row["asked_density"]): row for row in sorted(rows, key=by_kernels)}
    return list(found.values())


def by_kernels(row: Row) -> bool:
    return row["where"] not in (EMULATION, REFERENCE)


def _rounded(row: Row) -> Row:
    return {
        name: round(value, DIGITS) if isinstance(value, float) else value
        for name, value in row.items()
    }
