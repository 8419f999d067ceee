# SPDX-License-Identifier: Apache-2.0
"""Writes the README's benchmark tables from benchmarks/results; a test runs it with --check.

python -m benchmarks.report [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from .timing import ROOT

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks:begin -->\n", "<!-- benchmarks:end -->"
DENSITIES = (1.0, 0.5, 0.3, 0.2, 0.1)
TITLES = {
    "mochi": "Mochi 848x480x163: 24 heads x 128, 44,776 tokens",
    "cogx2b": "CogVideoX-2B 720x480x49: 30 heads x 64, 17,776 tokens",
}
CONFIGS = (
    "default",
    "topk 0.5, pvthreshd 15",
    "topk 0.2, pvthreshd 15",
    "auto budget 0.2, pvthreshd 15",
)


def read(name: str) -> list[dict[str, Any]]:
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def attention(rows: list[dict[str, Any]]) -> str:
    text = ""
    for shape, title in TITLES.items():
        of_shape = [row for row in rows if row["shape"] == shape]
        cells = {
            (row["peer"], min(DENSITIES, key=lambda d: abs(d - row["density"]))): row
            for row in of_shape
        }
        peers = list(dict.fromkeys(row["peer"] for row in of_shape))
        lines = []
        for peer in peers:
            found = [cells.get((peer, density)) for density in DENSITIES]
            error = max(row["rel_l1"] for row in found if row)
            times = [f"{row['ms']:.1f}" if row else "" for row in found]
            lines.append([peer, *times, f"{error:.4f}"])
        header = [title, "dense", *(f"{100 * d:.0f} %" for d in DENSITIES[1:]), "rel. L1"]
        text += table(header, lines) + "\n"
    return text


def comfyui(rows: list[dict[str, Any]]) -> str:
    timed = [row for row in rows if "seconds_per_call" in row]
    seconds = {(row["model"], row["config"]): row["seconds_per_call"] for row in timed}
    shapes = {row["model"]: row["shape"] for row in timed}
    lines = [
        [f"{model} {shapes[model]}", *(f"{seconds[model, config]:.2f}" for config in CONFIGS)]
        for model in shapes
    ]
    return table(["one denoising call, seconds", *CONFIGS], lines)


def section() -> str:
    calls, model_calls = read("h200_attention.jsonl"), read("h200_comfyui.jsonl")
    about_calls = (
        f"Milliseconds of one attention call on one {calls[0]['gpu']}, every stage included, one "
        f"run (commit {calls[0]['commit']}). Error: of our rows against float32 over the same "
        "blocks, of the others against float32 over all keys (`sol_attn` adds pooled terms for "
        "what it drops).\n\n"
    )
    about_models = (
        f"ComfyUI {model_calls[-1]['comfyui']}, full-size models with random weights, same kind of "
        "GPU, sparse calls (an auto mode's first call is dense and measured):\n\n"
    )
    return f"\n{about_calls}{attention(calls)}{about_models}{comfyui(model_calls)}\n"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = before + BEGIN + section() + END + after
    if "--check" in sys.argv[1:]:
        return int(wanted != text)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
