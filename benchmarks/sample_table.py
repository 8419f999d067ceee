# SPDX-License-Identifier: Apache-2.0
"""Rows of `benchmarks.sample_cost` as the table in docs/benchmarks.md of what measuring takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparge.order.variants import Walk

from .shapes import SHAPES
from .speed_table import table

Row = Mapping[str, Any]

HEAD = (
    "both token orders of one conditioning",
    "ms",
    "of one dense call",
    "of four",
    "of ten",
    "dense call with it, by cuDNN",
)


def samples_table(rows: Sequence[Row]) -> str:
    """Table of the models' shapes, where dense calls were timed, too; flash serves those that a
    measurement is a share of."""
    names = {(shape.tokens, shape.heads, shape.head_dim): name for name, shape in SHAPES.items()}
    measured, lines = len(Walk), []
    for row in rows:
        name = names.get((row["tokens"], row["heads"], row["head_dim"]))
        timed = row["walks"] == measured and row["calls"] == 1 and row.get("dense_ms")
        if name and timed:
            lines.append([name, f"{row['ms']:.2f}", *_shares(row["ms"], row["dense_ms"])])
    return table(list(HEAD), lines)


def _shares(ms: float, dense: Mapping[str, float]) -> list[str]:
    flash = dense["flash"]
    shares = (f"{100 * ms / flash / calls:.1f} %" for calls in (1, 4, 10))
    return [*shares, f"{100 * ((dense['cudnn'] + ms) / flash - 1):+.0f} %"]
