# SPDX-License-Identifier: Apache-2.0
"""Rows of `benchmarks.attention` as tables of docs/benchmarks.md, beside the GPU's limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sparge.blocks import KEY_BLOCK, block_count

from .limits import DENSITIES, Ceilings, bound
from .prose import paragraph
from .shapes import SHAPES
from .speed_rows import OURS as PLAIN
from .speed_rows import OURS_BUDGETS as OURS
from .speed_rows import OURS_SPREAD as SPREAD

Row = dict[str, Any]

#: Titles of the shapes that have tables of their own.
TITLES = {
    "mochi": "Mochi 848x480x163: 24 heads x 128, 44,776 tokens",
    "cogx2b": "CogVideoX-2B 720x480x49: 30 heads x 64, 17,776 tokens",
}
SPARSE_PEER = "comfy-kitchen sol_attn"
SUMMARY_DENSITY = 0.2


def asked_density(row: Row) -> float:
    """Asked density of a row; rows before `asked_density` was written were of an even density."""
    return row.get("asked_density") or min(DENSITIES, key=lambda d: abs(d - row["density"]))


@dataclass(frozen=True)
class Speeds:
    """Rows of one shape, by who and how dense."""

    shape: str
    cells: dict[tuple[str, float], Row]

    @classmethod
    def of(cls, rows: Iterable[Row], shape: str) -> Speeds:
        timed = [row for row in rows if row["shape"] == shape and "ms" in row]
        return cls(shape, {(row["peer"], asked_density(row)): row for row in timed})

    @property
    def peers(self) -> list[str]:
        return list(dict.fromkeys(peer for peer, _ in self.cells))

    def ms(self, peer: str, density: float) -> float | None:
        row = self.cells.get((peer, density))
        return row["ms"] if row else None

    def before_attend_ms(self, peer: str, density: float) -> float | None:
        return self.cells.get((peer, density), {}).get("before_attend_ms")

    def limit(self, peer: str, density: float, most: Ceilings) -> float | None:
        """Milliseconds that the row's own work takes at least."""
        row = self.cells.get((peer, density))
        if row is None:
            return None
        pooled = row.get("pooled_heads", 0.0)
        return bound(SHAPES[self.shape], row["density"], most, pooled).total

    def reached(self, peer: str, density: float, most: Ceilings) -> float | None:
        """Share of the time that the limit is."""
        limit, ms = self.limit(peer, density, most), self.ms(peer, density)
        return None if limit is None or ms is None else limit / ms

    def attend_rate(self, peer: str, density: float) -> float | None:
        """Rate of the attend kernel alone: shares of all pairs that it computes in a millisecond.
        None where what comes before it was not timed.

        A pseudo-key of each block counts beside the pairs, but nothing that only fills a step. The
        time is that of calls in a row less what comes before attend, not that of stages timed one
        by one (docs/experiments.md, A GPU that rested). What comes before is timed at rest, which
        makes rates too low, if anything.
        """
        row = self.cells.get((peer, density))
        before = self.before_attend_ms(peer, density)
        if row is None or before is None:
            return None
        tokens = SHAPES[self.shape].tokens
        pseudo_keys = block_count(tokens, KEY_BLOCK) / tokens if density < 1 else 0.0
        executed = row["density"] + row.get("pooled_heads", 0.0) * pseudo_keys
        return executed / (row["ms"] - before)

    def fastest_dense_peer(self) -> str | None:
        peers = [p for p, density in self.cells if density == 1 and not p.startswith(PLAIN)]
        return min(peers, key=lambda peer: self.cells[peer, 1.0]["ms"], default=None)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def tables(rows: Sequence[Row], most: Ceilings | None) -> str:
    """Tables for each of TITLES, one for all other shapes, and who is absent."""
    parts = [_shape_table(Speeds.of(rows, shape), title, most) for shape, title in TITLES.items()]
    others = [shape for shape in dict.fromkeys(row["shape"] for row in rows) if shape not in TITLES]
    if others:
        parts.append(summary("other shapes", [Speeds.of(rows, shape) for shape in others], most))
    if names := absent(rows):
        parts.append(paragraph(f"Not measured: {'; '.join(names)}."))
    return "\n".join(parts)


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


def _shape_table(speeds: Speeds, title: str, most: Ceilings | None) -> str:
    lines = []
    for peer in speeds.peers:
        errors = {
            density: row["rel_l1"]
            for density in DENSITIES
            if (row := speeds.cells.get((peer, density)))
        }
        least_alike = max(errors, key=lambda density: errors[density])
        times = [_milliseconds(speeds.ms(peer, density)) for density in DENSITIES]
        lines.append([peer, *times, f"{errors[least_alike]:.4f} ({_density(least_alike)})"])
    ours = OURS if OURS in speeds.peers else PLAIN
    executed = [speeds.cells.get((ours, density)) for density in DENSITIES]
    rates = [f"{row['executed_tflops'] / 1000:.2f}" if row else "" for row in executed]
    lines.append([f"PFLOP/s of kept pairs, {ours}, whole call", *rates, ""])
    for peer in (PLAIN, OURS):
        before = [speeds.before_attend_ms(peer, density) for density in DENSITIES]
        if any(before):
            shown = [f"{ms:.3f}" if ms else "" for ms in before]
            lines.append([f"means, quantize and route of {peer}", *shown, ""])
    own_dense = speeds.attend_rate(PLAIN, 1.0)
    for peer in (PLAIN, OURS, SPREAD):
        found = [speeds.attend_rate(peer, density) for density in DENSITIES]
        if own_dense and any(found):
            shares = [rate / own_dense if rate else None for rate in found]
            lines.append(
                [f"executed rate of attend, {peer} / ours dense", *map(_percent, shares), ""]
            )
    if most is not None:
        limits = [speeds.limit(PLAIN, density, most) for density in DENSITIES]
        lines.append(["limit", *map(_milliseconds, limits), ""])
        for peer in (PLAIN, OURS):
            shares = [speeds.reached(peer, density, most) for density in DENSITIES]
            if any(shares):
                lines.append([f"limit / {peer}", *map(_percent, shares), ""])
    header = [title, *map(_density, DENSITIES), "largest rel. L1 (at)"]
    return table(header, lines)


def summary(title: str, shapes: Sequence[Speeds], most: Ceilings | None) -> str:
    """Table with a line for each shape; without the limits where there are none."""
    lines = []
    for speeds in shapes:
        peer, row = speeds.fastest_dense_peer(), speeds.cells.get((OURS, SUMMARY_DENSITY))
        lines.append(
            [
                _about(speeds.shape),
                f"{_milliseconds(speeds.ms(peer, 1.0))} ({peer})" if peer else "",
                _milliseconds(speeds.ms(SPARSE_PEER, SUMMARY_DENSITY)),
                *(_milliseconds(speeds.ms(OURS, density)) for density in DENSITIES),
                f"{row['dense_equivalent_tflops'] / 1000:.2f}" if row else "",
                *([_percent(speeds.reached(OURS, SUMMARY_DENSITY, most))] if most else []),
            ]
        )
    percent = f"{100 * SUMMARY_DENSITY:.0f} %"
    header = [
        title,
        "fastest dense peer",
        f"sol_attn {percent}",
        f"{OURS}: dense",
        *(f"{100 * d:.0f} %" for d in DENSITIES[1:]),
        f"PFLOP/s dense-equivalent at {percent}",
        *([f"limit / ours at {percent}"] if most else []),
    ]
    return table(header, lines)


def _about(name: str) -> str:
    shape = SHAPES[name]
    return f"{name}: {shape.heads} x {shape.head_dim}, {shape.tokens:,} tokens"


def _milliseconds(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _density(density: float) -> str:
    return "dense" if density == 1 else _percent(density)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
