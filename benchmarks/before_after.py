# SPDX-License-Identifier: Apache-2.0
"""Times of this library's calls beside those of another version of it, in one process, in turns.

    python -m benchmarks.before_after --base FOLDER [--shapes mochi,cogx2b] [--out FILE]

FOLDER is a copy of another version's `sparge`, under a name of its own and with its `csrc` inside;
the name is that of the version. Unlike `kernel_variants`, this compares versions whose kernels take
other parameters, and whole calls with what the host does.

One JSON object for each shape, way and density: base_ms and ms (medians over the rounds), gain (the
base's time over this one's, less 1), spread (of the gains of the rounds: half of the distance
between the quartiles), equal (both give the same bits), gpu, commit. Ways: 8 bits, 16 bits, and
"budgets" (every head pools what it drops, in token order).
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import sparge

from .inputs import draw
from .shapes import SHAPES, Shape
from .timing import ROOT, commit, gpu_name, median_ms, require_kernels, write_rows

Qkv = tuple[Tensor, Tensor, Tensor]
WAYS = ("8 bits", "16 bits", "budgets")


def load_base(folder: Path) -> ModuleType:
    """Loads the other version, which keeps ops and kernels of its own."""
    sys.path.insert(0, str(folder.resolve().parent))
    return importlib.import_module(folder.name)


def _grid(library: ModuleType, shape: Shape) -> Any:
    """Token grid of the shape as one of the library's; a field that it lacks is left out."""
    known = {part.name for part in fields(library.TokenGrid)}
    return library.TokenGrid(**{k: v for k, v in vars(shape.grid).items() if k in known})


def call(library: ModuleType, shape: Shape, way: str, density: float, qkv: Qkv) -> Callable:
    """Makes a call of `library`, without arguments."""
    precision = library.Precision.SIXTEEN_BIT if way == "16 bits" else library.Precision.INT8
    policy = library.SparsePolicy(topk=density, precision=precision)
    options: dict[str, Any] = {}
    if way == "budgets":
        router, device = library.Router.ERROR, qkv[0].device
        options["order"] = library.grid_order(_grid(library, shape)).on(device)
        options["budget"] = library.HeadBudget.uniform(shape.heads, density, 0.5, router, device)
    return lambda: library.attention(*qkv, policy, out_layout="NHD", **options)


def compare(
    base: ModuleType, shape: Shape, densities: list[float], rounds: int
) -> Iterator[dict[str, Any]]:
    qkv = draw(shape)
    for density in densities:
        for way in WAYS:
            calls = [call(library, shape, way, density, qkv) for library in (base, sparge)]
            equal = torch.equal(calls[0](), calls[1]())
            times = [[], []]
            for round_number in range(rounds):
                for which in (0, 1) if round_number % 2 else (1, 0):
                    times[which].append(median_ms(calls[which], repeats=5, warm_up=2))
            gains = [before / after - 1 for before, after in zip(*times, strict=True)]
            low, _, high = statistics.quantiles(gains, n=4)
            yield {
                "shape": shape.name,
                "way": way,
                "density": density,
                "base_ms": round(statistics.median(times[0]), 4),
                "ms": round(statistics.median(times[1]), 4),
                "gain": round(statistics.median(gains), 4),
                "spread": round((high - low) / 2, 4),
                "equal": equal,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--densities", default="1,.2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "new.jsonl")
    options = parser.parse_args()
    require_kernels()
    base = load_base(options.base)
    facts = {"gpu": gpu_name(), "base": options.base.name, "commit": options.commit}
    densities = [float(text) for text in options.densities.split(",")]
    rows: list[dict[str, Any]] = []
    for name in options.shapes.split(","):
        for measured in compare(base, SHAPES[name], densities, options.rounds):
            rows.append(measured | facts)
            print(json.dumps(rows[-1]), flush=True)
        write_rows(options.out, rows)


if __name__ == "__main__":
    main()
