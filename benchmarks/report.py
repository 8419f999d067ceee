# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/benchmarks.md and the README's table of runs.

python -m benchmarks.report [--check]

They are made from benchmarks/results; a test checks them. A table named NAME stands between
`<!-- NAME:begin -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from .limits import read_rates
from .quality import rows as quality
from .quality.section import PARTS, part_table, targets_table
from .speed_table import TITLES, Speeds, absent, shape_table, summary, table
from .timing import ROOT, read_rows

Row = dict[str, Any]

RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
#: Files of `benchmarks.attention`, of `benchmarks.whole_run`, and of measurements.
SPEEDS, SPEEDS_H100 = "h200.json", "h100.json"
RUNS = "whole_runs.jsonl"
LIMITS = read_rates(RESULTS / "h200_limits.json")
#: A run by its `plain` name.
AUTO = "auto budget 0.2"
#: Names of the models by `model` of the rows.
NAMES = {"mochi": "Mochi", "cogvideox": "CogVideoX-5B", "wan": "Wan 14B", "flux": "Flux"}
NAMES |= {"wan22": "Wan 2.2 14B", "wan1.3b": "Wan 1.3B", "hunyuan": "HunyuanVideo"}
NAMES |= {"qwen": "Qwen-Image", "zimage": "Z-Image", "sd35": "SD3.5 large"}


def read(name: str) -> list[Row]:
    return read_rows(RESULTS / name)


def plain(config: str) -> str:
    """Name of a run without its pvthreshd, whose default was 15 once and is 50, which is off."""
    return re.sub(r", pvthreshd [\d.]+", "", config)


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


def _is_of_the_readme(row: Row) -> bool:
    """Whether a run is one of those that the README shows: nothing beside the node, as many dense
    steps as a new node has. Flux has no sparse steps."""
    return (
        plain(row["config"]) == AUTO
        and row["cfg"] == 1
        and row["steps"] == 20
        and (row["model"] == "flux" or row["start_percent"] == 0.1)
        and row["model"] in list(NAMES)[:4]
        and "latent frames" not in row["shape"]
    )


def runs_of_the_readme() -> str:
    head = ("20 steps, auto budget 0.2", "start_percent", "without", "with", "speedup", "GPU")
    return _runs_table(head, [_run(row) for row in read(RUNS) if _is_of_the_readme(row)])


def all_runs() -> str:
    lines = []
    for row in read(RUNS):
        name, *numbers, gpu = _run(row)
        name += f", {row['steps']} steps, cfg {row['cfg']:g}, {plain(row['config'])}"
        name += ", extrapolated" * ("extrapolated" in row)
        lines.append([name, *numbers, _memory(row), f"{gpu}, {row['commit']}"])
    head = ("run", "start_percent", "without", "with", "speedup", "most memory", "GPU, commit")
    return _runs_table(head, lines)


def _memory(row: Row) -> str:
    """Most memory of a run on the GPU, and of one without the node where that was read."""
    found = (row.get(name) for name in ("default_peak_gib", "peak_gib"))
    numbers = " -> ".join(f"{gib:.1f}" for gib in found if gib is not None)
    return f"{numbers} GiB" if numbers else ""


def _run(row: Row) -> list[str]:
    """Model and size, `start_percent`, seconds without the node and with it, speedup, GPU."""
    seconds = [f"{row[name]:.3g} s" for name in ("default_run_seconds", "run_seconds")]
    gpu = row["gpu"].removeprefix("NVIDIA ").split()[0]
    name = f"{NAMES[row['model']]} {row['shape'].split(',')[0]}"
    return [name, f"{row.get('start_percent', '-')}", *seconds, f"{row['ratio']:.2f}", gpu]


def _runs_table(head: Sequence[str], lines: list[list[str]]) -> str:
    return "\n" + table(head, lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "runs": runs_of_the_readme,
    "all-runs": all_runs,
    **{f"speed-{shape}": lambda shape=shape: speed_of(shape) for shape in TITLES},
    "speed-others": other_speeds,
    "speed-h100": lambda: summary("H100", _speeds(SPEEDS_H100), None) + source(SPEEDS_H100),
    **{name: lambda part=part: part_table(quality.read(), part) for name, part in PARTS.items()},
    **{
        f"targets-{data}": lambda data=data: targets_table(quality.read(), PARTS[f"quality-{data}"])
        for data in ("dit", "4-steps", "8-steps")
    },
}


def written(text: str) -> str:
    """Text of a page with the tables that it names as the results make them."""
    for name in re.findall(r"<!-- ([\w-]+):begin -->", text):
        if name in TABLES:
            begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
            before, rest = text.split(begin)
            text = before + begin + TABLES[name]() + end + rest.split(end, 1)[1]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare, fail if any differs")
    check = parser.parse_args().check
    pages = {path: path.read_text(encoding="utf-8") for path in PAGES}
    if check:
        return int(any(written(text) != text for text in pages.values()))
    for path, text in pages.items():
        path.write_text(written(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
