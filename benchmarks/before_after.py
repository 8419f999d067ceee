# SPDX-License-Identifier: Apache-2.0
"""Calls of two versions of the library in one process: the same bits or not, and times in turns.

    python -m benchmarks.before_after --base FOLDER [--shapes mochi,cogx2b] [--loaded]
    python -m benchmarks.before_after --overlay FOLDER

--base names a copy of another version's `sparge`, under a name of its own and with its `csrc`
inside; it is compared with this one. --overlay names a folder with those files of csrc that a
variant changes, laid out as csrc is; a copy of this version with them is compared with the base,
which is this version where none is given. Kernels may take other parameters, and calls are whole,
with what the host does.

One JSON object for each shape, way and density: base_ms and ms (medians over the rounds), gain (the
base's time over the other's, less 1), spread (of the gains of the rounds: half of the distance
between the quartiles), equal (both give
the same bits), gpu, commit. Ways: 8 bits, 16 bits, and "budgets" (every head pools what it drops,
in token order). With --loaded the GPU multiplies matrices between the calls and is at its power
limit, as in a model; without, calls are in a row.

`python -m NAME.kernels.build --arch sm_90a`, NAME that of a version, prints its registers and
spills.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import sparge

from .inputs import draw
from .model_load import ModelLoad, loaded_ms
from .shapes import SHAPES, Shape
from .timing import ROOT, commit, gpu_name, median_ms, require_kernels, write_rows

Qkv = tuple[Tensor, Tensor, Tensor]
Row = dict[str, Any]
WAYS = ("8 bits", "16 bits", "budgets")


def load_version(folder: Path) -> ModuleType:
    """Loads another version, which keeps ops and kernels of its own."""
    sys.path.insert(0, str(folder.resolve().parent))
    return importlib.import_module(folder.name)


def overlaid(overlay: Path, to: Path) -> Path:
    """A copy of this version with the overlay's files in its csrc, named like the overlay."""
    copied = to / overlay.resolve().name
    shutil.copytree(ROOT / "sparge", copied, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "csrc", copied / "csrc")
    shutil.copytree(overlay, copied / "csrc", dirs_exist_ok=True)
    return copied


def call(library: ModuleType, shape: Shape, way: str, density: float, qkv: Qkv) -> Callable:
    """Makes a call of `library`, without arguments."""
    precision = library.Precision.SIXTEEN_BIT if way == "16 bits" else library.Precision.INT8
    policy = library.SparsePolicy(topk=density, precision=precision)
    options: dict[str, Any] = {}
    if way == "budgets":
        router, device = library.Router.ERROR, qkv[0].device
        grid = library.TokenGrid(**vars(shape.grid))
        options["order"] = library.grid_order(grid).on(device)
        settings = library.HeadSettings.uniform(shape.heads, density, 0.5, router, device)
        options["head_settings"] = settings
    return lambda: library.attention(*qkv, policy, out_layout="NHD", **options)


def compare(
    versions: list[ModuleType],
    shape: Shape,
    densities: list[float],
    rounds: int,
    ms_of: Callable[[Callable], float],
) -> Iterator[Row]:
    qkv = draw(shape)
    for density in densities:
        for way in WAYS:
            calls = [call(library, shape, way, density, qkv) for library in versions]
            equal = torch.equal(calls[0](), calls[1]())
            times: list[list[float]] = [[], []]
            for round_number in range(rounds):
                for which in (0, 1) if round_number % 2 else (1, 0):
                    times[which].append(ms_of(calls[which]))
            named = {"shape": shape.name, "way": way, "density": density}
            yield named | beside(*times) | {"equal": equal}


def beside(base: list[float], own: list[float]) -> Row:
    """Medians over the rounds, the gain over the base and its spread."""
    gains = [before / after - 1 for before, after in zip(base, own, strict=True)]
    low, _, high = statistics.quantiles(gains, n=4)
    return {
        "base_ms": round(statistics.median(base), 4),
        "ms": round(statistics.median(own), 4),
        "gain": round(statistics.median(gains), 4),
        "spread": round((high - low) / 2, 4),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--base", type=Path, help="folder of another version")
    parser.add_argument("--overlay", type=Path, help="folder with changed files of csrc")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--densities", default="1,.2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loaded", action="store_true", help="at the GPU's power limit")
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "new.jsonl")
    options = parser.parse_args(arguments)
    if not (options.base or options.overlay):
        parser.error("name another version with --base, or changed sources with --overlay")
    require_kernels()
    load = ModelLoad.on("cuda") if options.loaded else None

    def ms_of(work: Callable) -> float:
        return loaded_ms(work, load, 5) if load else median_ms(work, repeats=5, warm_up=2)

    with tempfile.TemporaryDirectory() as folder:
        own = load_version(overlaid(options.overlay, Path(folder))) if options.overlay else sparge
        versions = [load_version(options.base) if options.base else sparge, own]
        facts = {"gpu": gpu_name(), "base": versions[0].__name__, "commit": options.commit}
        facts |= {"version": own.__name__, "loaded": options.loaded}
        rows: list[Row] = []

        def report(found: Iterator[Row]) -> None:
            for row in found:
                rows.append(row | facts)
                print(json.dumps(rows[-1]), flush=True)
            write_rows(options.out, rows)

        densities = [float(text) for text in options.densities.split(",")]
        for name in options.shapes.split(","):
            report(compare(versions, SHAPES[name], densities, options.rounds, ms_of))


if __name__ == "__main__":
    main()
