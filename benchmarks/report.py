# SPDX-License-Identifier: Apache-2.0
"""Writes the tables and pictures of docs/benchmarks.md and the README's table of runs.

python -m benchmarks.report [--check]

They are made from benchmarks/results; a test checks them. A table named NAME stands between
`<!-- NAME:begin -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparge.order.variants import OrderKind

from . import pictures
from .limits import read_rates
from .quality import rows as quality
from .quality.section import PARTS, chosen, part_table, targets_table
from .shapes import SHAPES
from .speed_table import TITLES, Speeds, absent, shape_table, summary, table
from .timing import ROOT, read_rows

Row = dict[str, Any]

RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
#: Files of `benchmarks.attention`, of `benchmarks.whole_run`, and of measurements.
SPEEDS, SPEEDS_H100 = "h200.json", "h100.json"
CALLS, CALLS_H100 = "h200_comfyui.jsonl", "h100_comfyui.jsonl"
RUNS = "whole_runs.jsonl"
SAMPLES = "h200_samples.jsonl"
LIMITS = read_rates(RESULTS / "h200_limits.json")
DEFAULT, AUTO = "default", "auto budget 0.2, pvthreshd 15"
CONFIGS = (
    DEFAULT,
    "topk 0.5, pvthreshd 15",
    "topk 0.2, pvthreshd 15",
    AUTO,
    f"{AUTO}, residual in 0.5 of every second step",
    f"{AUTO}, residual in 0.5",
)
#: Names of the models by `model` of the rows.
NAMES = {"mochi": "Mochi", "cogvideox": "CogVideoX-5B", "wan": "Wan 14B", "flux": "Flux"}
NAMES |= {"wan22": "Wan 2.2 14B", "wan1.3b": "Wan 1.3B", "hunyuan": "HunyuanVideo"}


def read(name: str) -> list[Row]:
    return read_rows(RESULTS / name)


def paragraph(text: str) -> str:
    """Text on lines as short as those of the documents, with an empty line before it."""
    return "\n" + textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def source(name: str) -> str:
    """Paragraph on the GPU and the commits of a file's rows."""
    rows = read(name)
    gpu, commits = rows[0]["gpu"], ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return paragraph(f"{gpu}, commit {commits} (`{name}`).")


def _speeds(name: str, shapes: Sequence[str] = ()) -> list[Speeds]:
    """Rows of these shapes, or of all that the file has but those with tables of their own."""
    rows = read(name)
    return [Speeds.of(rows, shape) for shape in shapes or dict.fromkeys(r["shape"] for r in rows)]


def speed_of(shape: str) -> str:
    (speeds,) = _speeds(SPEEDS, [shape])
    return shape_table(speeds, LIMITS)


def other_speeds() -> str:
    others = [speeds for speeds in _speeds(SPEEDS) if speeds.shape not in TITLES]
    missing = paragraph(f"Not measured: {'; '.join(absent(read(SPEEDS)))}.")
    return summary("other shapes", others, LIMITS) + source(SPEEDS) + missing


def model_calls(name: str) -> str:
    """Table of ComfyUI calls, without columns for what was not measured."""
    seconds = _seconds(name)
    shapes = {row["model"]: row["shape"] for row in read(name) if "model" in row}
    configs = [config for config in CONFIGS if any(config == found for _, found in seconds)]
    lines = [
        [f"{model} {shape}", *(_cell(seconds.get((model, config))) for config in configs)]
        for model, shape in shapes.items()
    ]
    return table(["one denoising call, seconds", *configs], lines) + source(name)


def _seconds(name: str) -> dict[tuple[str, str], float]:
    timed = [row for row in read(name) if "seconds_per_call" in row]
    return {(row["model"], row["config"]): row["seconds_per_call"] for row in timed}


def _cell(seconds: float | None) -> str:
    """Three digits; empty where nothing was measured."""
    return "" if seconds is None else f"{seconds:#.3g}"


def runs_table() -> str:
    """A model a line, ComfyUI's attention beside ours."""
    lines = []
    for row in read(RUNS):
        without, sparse = (f"{row[name]:.3g} s" for name in ("default_run_seconds", "run_seconds"))
        name = f"{NAMES[row['model']]} {row['shape'].split(',')[0]}"
        gpu = row["gpu"].removeprefix("NVIDIA ").split()[0]
        lines.append([name, without, sparse, f"{row['ratio']:.2f}", f"{gpu}, {row['commit']}"])
    head = ("20 steps", "ComfyUI's attention", "auto budget 0.2", "times as fast", "GPU, commit")
    return "\n" + table(head, lines) + "\n"


def measurements_table() -> str:
    """Table of the models' shapes, where dense calls were timed, too; flash serves those that a
    measurement is a share of."""
    names = {(shape.tokens, shape.heads, shape.head_dim): name for name, shape in SHAPES.items()}
    measured, lines = len(OrderKind), []
    for row in read(SAMPLES):
        name = names.get((row["tokens"], row["heads"], row["head_dim"]))
        if name and row["walks"] == measured and row["calls"] == 1 and row.get("dense_ms"):
            lines.append([name, f"{row['ms']:.2f}", *_shares(row["ms"], row["dense_ms"])])
    head = ["both token orders of one conditioning", "ms", "of one dense call", "of four", "of ten"]
    return table(head, lines) + source(SAMPLES)


def _shares(ms: float, dense: Mapping[str, float]) -> list[str]:
    return [f"{100 * ms / dense['flash'] / calls:.1f} %" for calls in (1, 4, 10)]


TABLES: dict[str, Callable[[], str]] = {
    "runs": runs_table,
    **{f"speed-{shape}": lambda shape=shape: speed_of(shape) for shape in TITLES},
    "speed-others": other_speeds,
    "speed-h100": lambda: summary("H100", _speeds(SPEEDS_H100), None) + source(SPEEDS_H100),
    "models": lambda: model_calls(CALLS),
    "models-h100": lambda: model_calls(CALLS_H100),
    "measuring": measurements_table,
    **{name: lambda part=part: part_table(quality.read(), part) for name, part in PARTS.items()},
    "quality-targets": lambda: targets_table(quality.read()),
}


def written(text: str) -> str:
    """Text of a page with the tables that it names as the results make them."""
    for name in re.findall(r"<!-- ([\w-]+):begin -->", text):
        if name in TABLES:
            begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
            before, rest = text.split(begin)
            text = before + begin + TABLES[name]() + end + rest.split(end, 1)[1]
    return text


def draw(folder: Path) -> None:
    pictures.draw_speed(folder, _speeds(SPEEDS, list(TITLES)), LIMITS)
    for part in PARTS.values():
        if part.picture:
            rows = chosen(quality.read(), part)
            lines = pictures.quality_lines(rows, part.field)
            pictures.draw(folder / part.picture, rows[0]["data"], part.field, lines)


def main() -> int:
    pages = {path: path.read_text(encoding="utf-8") for path in PAGES}
    if "--check" in sys.argv[1:]:
        return int(any(written(text) != text for text in pages.values()))
    for path, text in pages.items():
        path.write_text(written(text), encoding="utf-8")
    draw(RESULTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
