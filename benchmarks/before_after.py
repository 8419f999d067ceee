# SPDX-License-Identifier: Apache-2.0
"""Calls of two versions of the library in one process: the same bits or not, and times in turns.

    python -m benchmarks.before_after --base FOLDER [--shapes mochi,cogx2b] [--loaded] [--cases]
    python -m benchmarks.before_after --overlay FOLDER

--base names a copy of another version's `sparge`, under a name of its own and with its `csrc`
inside; it is compared with this one. --overlay names a folder with those files of csrc that a
variant changes, laid out as csrc is; a copy of this version with them is compared with the base,
which is this version where none is given. Kernels may take other parameters, and calls are whole,
with what the host does.

One JSON object for each shape, way and density: base_ms and ms (medians over the rounds), gain (the
base's time over the other's, less 1), spread (of the gains of the rounds: half of the distance
between the quartiles), base_attend_ms and attend_ms (of the attend kernel alone), equal (both give
the same bits), gpu, commit. Ways: 8 bits, 16 bits, and "budgets" (every head pools what it drops,
in token order). With --loaded the GPU multiplies matrices between the calls and is at its power
limit, as in a model; without, calls are in a row.

--cases first compares both on the shapes of the GPU tests, an object each: case, equal, most
(largest difference; null where only one of two values is finite), repeatable (the base gives the
same bits twice). `python -m NAME.kernels.build --arch sm_90a`, NAME that of a version, prints its
registers and spills.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import sparge

from .inputs import draw
from .model_load import ModelLoad, loaded_times
from .shapes import SHAPES, Shape
from .stages import ATTEND, stage_ms
from .timing import ROOT, commit, gpu_name, median_ms, require_kernels, write_rows

Qkv = tuple[Tensor, Tensor, Tensor]
Row = dict[str, Any]
WAYS = ("8 bits", "16 bits", "budgets")
CASE_DENSITIES = ((1.0, 50.0), (0.3, 50.0), (0.4, 9.0))  # with the PV filter that goes with each


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
        known = {part.name for part in fields(library.TokenGrid)}  # which may have other fields
        grid = library.TokenGrid(**{k: v for k, v in vars(shape.grid).items() if k in known})
        options["order"] = library.grid_order(grid).on(device)
        now = hasattr(library, "HeadSettings")  # bases may be older than the name
        made = library.HeadSettings if now else library.HeadBudget
        name = "head_settings" if now else "budget"
        options[name] = made.uniform(shape.heads, density, 0.5, router, device)
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
            row = named | beside(*times) | {"equal": equal}
            for name, work, library in zip(("base_", ""), calls, versions, strict=True):
                ms = stage_ms(work, 5, library.__name__)[ATTEND]
                row[f"{name}attend_ms"] = round(ms, 4)
            yield row


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


def difference(found: Tensor, expected: Tensor) -> tuple[bool, float]:
    """Whether all bits are equal, and the largest difference: inf where one alone is finite."""
    equal = torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (found, expected)))
    apart = (found.double() - expected.double()).abs()
    apart = apart.where(~apart.isnan(), math.inf)
    apart = apart.where(found.isfinite() | expected.isfinite(), 0.0)
    return equal, float(apart.max()) if apart.numel() else 0.0


def compare_cases(versions: list[ModuleType], device: str = "cuda") -> Iterator[Row]:
    """Compares both on the shapes of the GPU tests."""
    from tests.gpu.cases import CASES, make_qkv

    generator = torch.Generator().manual_seed(0)
    for case in CASES:
        qkv, lengths = make_qkv(case, generator), case.key_lengths
        if lengths is not None:
            lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        for topk, pvthreshd in CASE_DENSITIES:
            expected, again, found = (
                library.attention(
                    *qkv,
                    library.SparsePolicy(topk=topk, pvthreshd=pvthreshd),
                    is_causal=case.causal,
                    key_lengths=lengths,
                )
                for library in (versions[0], versions[0], versions[1])
            )
            equal, most = difference(found, expected)
            row = {"case": f"{case.reason}, {topk:.0%}", "equal": equal}
            row["most"] = most if math.isfinite(most) else None
            yield row | {"repeatable": difference(again, expected)[0]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--base", type=Path, help="folder of another version")
    parser.add_argument("--overlay", type=Path, help="folder with changed files of csrc")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--densities", default="1,.2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loaded", action="store_true", help="at the GPU's power limit")
    parser.add_argument("--cases", action="store_true", help="compare the GPU tests' shapes, too")
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "new.jsonl")
    options = parser.parse_args(arguments)
    if not (options.base or options.overlay):
        parser.error("name another version with --base, or changed sources with --overlay")
    require_kernels()
    load = ModelLoad.on("cuda") if options.loaded else None

    def ms_of(work: Callable) -> float:
        return loaded_times(work, load, 5)[0] if load else median_ms(work, repeats=5, warm_up=2)

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

        if options.cases:
            report(compare_cases(versions))
        densities = [float(text) for text in options.densities.split(",")]
        for name in options.shapes.split(","):
            report(compare(versions, SHAPES[name], densities, options.rounds, ms_of))


if __name__ == "__main__":
    main()
