# SPDX-License-Identifier: Apache-2.0
"""Rows of `benchmarks.attention` as tables, beside the GPU's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .limits import Rates, limit_ms
from .shapes import SHAPES
from .speed_rows import OURS as PLAIN
from .speed_rows import OURS_BUDGETS as OURS

Row = dict[str, Any]
DENSITIES = (1.0, 0.5, 0.3, 0.2, 0.1)

#: Titles of the shapes that have tables of their own.
TITLES = {
    "mochi": "Mochi 848x480x163: 24 heads x 128, 44,776 tokens",
    "cogx2b": "CogVideoX-2B 720x480x49: 30 heads x 64, 17,776 tokens",
}
SPARSE_PEER = "comfy-kitchen sol_attn"
SUMMARY_DENSITY = 0.2


@dataclass(frozen=True)
class Speeds:
    """Rows of one shape, by who and how dense."""

    shape: str
    cells: dict[tuple[str, float], Row]

    @classmethod
    def of(cls, rows: Iterable[Row], shape: str) -> Speeds:
        timed = [row for row in rows if row["shape"] == shape and "ms" in row]
        return cls(shape, {(row["peer"], row["asked_density"]): row for row in timed})

    @property
    def peers(self) -> list[str]:
        return list(dict.fromkeys(peer for peer, _ in self.cells))

    def ms(self, peer: str, density: float) -> float | None:
        row = self.cells.get((peer, density))
        return row["ms"] if row else None

    def limit(self, peer: str, density: float, rates: Rates) -> float | None:
        """Milliseconds that the row's own work takes at least."""
        row = self.cells.get((peer, density))
        if row is None:
            return None
        return limit_ms(SHAPES[self.shape], row["density"], rates, row.get("pooled_heads", 0.0))

    def reached(self, peer: str, density: float, rates: Rates) -> float | None:
        """Share of the time that the limit is."""
        limit, ms = self.limit(peer, density, rates), self.ms(peer, density)
        return None if limit is None or ms is None else limit / ms

    def fastest_dense_peer(self) -> str | None:
        peers = [p for p, density in self.cells if density == 1 and not p.startswith(PLAIN)]
        return min(peers, key=lambda peer: self.cells[peer, 1.0]["ms"], default=None)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def absent(rows: Sequence[Row]) -> list[str]:
    """Sentences on absent peers: each peer and reason once, with the shapes that it concerns where
    that is not all, and their densities where others were measured."""
    everywhere = {row["shape"] for row in rows}
    measured = {(row["shape"], row["peer"]) for row in rows if "absent" not in row}
    places: dict[str, dict[str, None]] = {}
    for row in rows:
        if "absent" in row:
            partly = (row["shape"], row["peer"]) in measured
            density = f" {_density(row['asked_density'])}" if partly else ""
            found = places.setdefault(f"{row['peer']}: {row['absent']}", {})
            found[f"{row['shape']}{density}"] = None
    return [
        what if found.keys() == everywhere else f"{what} ({', '.join(found)})"
        for what, found in places.items()
    ]


def shape_table(speeds: Speeds, rates: Rates) -> str:
    """Table of one shape: peers and modes of ours, then rates and limits."""
    lines: list[list[str]] = []

    def add(name: str, values: Iterable[float | None], told: Callable[..., str]) -> None:
        values = list(values)
        if any(values):
            lines.append([name, *map(told, values), ""])

    for peer in speeds.peers:
        errors = {d: row["rel_l1"] for (name, d), row in speeds.cells.items() if name == peer}
        least_alike = max(errors, key=lambda density: errors[density])
        add(peer, [speeds.ms(peer, d) for d in DENSITIES], _milliseconds)
        lines[-1][-1] = f"{errors[least_alike]:.4f} ({_density(least_alike)})"
    executed = [speeds.cells.get((OURS, d), {}).get("executed_tflops") for d in DENSITIES]
    add(f"PFLOP/s of kept pairs, {OURS}, whole call", executed, _petaflops)
    add("limit", [speeds.limit(PLAIN, d, rates) for d in DENSITIES], _milliseconds)
    for peer in (PLAIN, OURS):
        add(f"limit / {peer}", [speeds.reached(peer, d, rates) for d in DENSITIES], _percent)
    return table([TITLES[speeds.shape], *map(_density, DENSITIES), "largest rel. L1 (at)"], lines)


def summary(title: str, shapes: Sequence[Speeds], rates: Rates | None) -> str:
    """Table with a line for each shape; without the limits where there are none."""
    percent = _percent(SUMMARY_DENSITY)
    header = [title, "fastest dense peer", f"sol_attn {percent}", f"{OURS}: dense"]
    header += [*map(_percent, DENSITIES[1:]), f"PFLOP/s dense-equivalent at {percent}"]
    header += [f"limit / ours at {percent}"] * (rates is not None)
    lines = []
    for speeds in shapes:
        peer, row = speeds.fastest_dense_peer(), speeds.cells.get((OURS, SUMMARY_DENSITY), {})
        line = [
            _about(speeds.shape),
            f"{_milliseconds(speeds.ms(peer, 1.0))} ({peer})" if peer else "",
            _milliseconds(speeds.ms(SPARSE_PEER, SUMMARY_DENSITY)),
            *(_milliseconds(speeds.ms(OURS, density)) for density in DENSITIES),
            _petaflops(row.get("dense_equivalent_tflops")),
        ]
        if rates is not None:
            line.append(_percent(speeds.reached(OURS, SUMMARY_DENSITY, rates)))
        lines.append(line)
    return table(header, lines)


def _about(name: str) -> str:
    shape = SHAPES[name]
    return f"{name}: {shape.heads} x {shape.head_dim}, {shape.tokens:,} tokens"


def _milliseconds(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _petaflops(tflops: float | None) -> str:
    return "" if tflops is None else f"{tflops / 1000:.2f}"


def _density(density: float) -> str:
    return "dense" if density == 1 else _percent(density)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
