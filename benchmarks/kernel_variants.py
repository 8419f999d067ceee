# SPDX-License-Identifier: Apache-2.0
"""Variants of the Hopper attend beside the one there is: numbers first, then times.

    python -m benchmarks.kernel_variants [--base FOLDER] [--build-only] [--rounds 3] [--out FILE]
                                         [OVERLAY...]

An overlay is a folder with those files of csrc that a variant changes, laid out as csrc is; its
name is the variant's. All are compared with the repository's csrc, or with another (--base), which
must take the same parameters; without an overlay the repository's is the variant. Every other
kernel is the repository's. Numbers of each variant come from a process of its own, so that one
that hangs or faults takes no other with it; variants that came through are timed in turns, in one
process. Different numbers are shown, not judged. The exit status is 1 when a variant failed, also
when no call of it was compared.

One JSON object a line:
build     variant, spec, registers, spills, stack (bytes)
numbers   variant, case, equal (bit by bit), most (largest absolute difference; null where only one
          of two values is finite), repeatable (the base gives the same bits twice)
compared  variant, calls, equal (how many), worst (of those that differ)
failed    variant, why
timing    variant, shape, case, round, attend_ms, stages_ms (sum of all stages), call_ms
summary   variant, shape, case, density: medians over the rounds, and attend_gain and call_gain, the
          base's time over the variant's, less 1
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparge import AttentionStats, capabilities
from sparge.errors import KernelBuildError
from sparge.kernels import KernelSpec, all_specs
from sparge.kernels.compile import NvrtcCompiler
from sparge.kernels.cubin import Cubin
from sparge.kernels.device import compiler
from sparge.kernels.driver import Kernel
from sparge.kernels.source import read_sources
from sparge.kernels.spec import HOPPER_ATTEND
from sparge.kernels.store import Store
from sparge.stages import launch

from .attention import OURS, OURS_BUDGETS, modes
from .inputs import draw
from .shapes import SHAPES, Shape
from .stages import stage_ms
from .timing import ROOT, commit, gpu_name, in_rounds, median_ms, require_kernels, write_rows

CSRC = ROOT / "csrc"
BASE, REPOSITORY = "base", "repository"
CHECK_SECONDS = 75  # for all variants, which run at the same time
SHOWN = 5  # calls that differ most
TIMED = ((1.0, OURS), (0.2, OURS), (0.2, OURS_BUDGETS), (0.1, OURS))

Row = dict[str, Any]


def overlaid(csrc: Path, overlay: Path | None, to: Path) -> Path:
    """A copy of csrc with the overlay's files in it."""
    shutil.copytree(csrc, to)
    if overlay is not None:
        shutil.copytree(overlay, to, dirs_exist_ok=True)
    return to


def built(csrc: Path, cubins: Path) -> dict[KernelSpec, Cubin]:
    """Cubins of the Hopper attend by spec, out of the folder of cubins or compiled into it."""
    store, nvrtc = Store(cubins), NvrtcCompiler(compiler())
    sources = read_sources(HOPPER_ATTEND, csrc)
    specs = [spec for spec in all_specs("sm_90a") if spec.entry == HOPPER_ATTEND]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(
            zip(specs, pool.map(lambda s: store.get(s, sources, nvrtc), specs), strict=True)
        )


class Variants:
    """Switch between variants: the library launches one where it would launch the repository's
    Hopper attend."""

    def __init__(self, sources: dict[str, Path], cubins: Path) -> None:
        self._kernels = {
            name: {
                spec: Kernel(cubin.image, spec.entry, torch.cuda.current_device())
                for spec, cubin in built(csrc, cubins).items()
            }
            for name, csrc in sources.items()
        }

    @contextmanager
    def using(self, name: str) -> Iterator[set[KernelSpec]]:
        """Yields a set of the variant's kernels that were asked for so far."""
        given, kernels = launch.get_kernel, self._kernels[name]
        asked: set[KernelSpec] = set()

        def get_kernel(spec: KernelSpec, device_index: int) -> Kernel:
            if spec not in kernels:
                return given(spec, device_index)
            asked.add(spec)
            return kernels[spec]

        launch.get_kernel = get_kernel
        try:
            yield asked
        finally:
            launch.get_kernel = given


def require_hopper() -> None:
    """Raises SystemExit where the kernel that variants stand for does not run."""
    require_kernels()
    arch = capabilities("cuda").arch
    if arch != "sm_90a":
        raise SystemExit(f"Nothing to time: variants are of {HOPPER_ATTEND}, and this is {arch}.")


def is_the_same(csrc: Path, base: Path) -> bool:
    """Whether an overlay changes nothing that the Hopper attend includes."""
    one, other = (read_sources(HOPPER_ATTEND, folder).hash for folder in (csrc, base))
    return one == other


@dataclass(frozen=True)
class Run:
    """Folders of csrc by variant, the base's first, and where their cubins are kept."""

    sources: dict[str, Path]
    cubins: Path

    def build(self) -> Iterator[Row]:
        for name, csrc in self.sources.items():
            try:
                same = name != BASE and is_the_same(csrc, self.sources[BASE])
                found = {} if same else built(csrc, self.cubins)
            except (KernelBuildError, FileNotFoundError) as error:
                yield failure(name, str(error))
                continue
            if same:
                yield failure(name, f"it changes nothing that {HOPPER_ATTEND}.cu includes")
            for spec, cubin in found.items():
                row = {"kind": "build", "variant": name, "spec": spec.id}
                if (report := cubin.report) is not None:
                    used = ("registers", "spills", "stack")
                    row |= {what: getattr(report, what) for what in used}
                yield row

    def compare(self, names: list[str]) -> Iterator[Row]:
        """Compares all variants at the same time."""
        with ThreadPoolExecutor(len(names)) as pool:
            for name, (rows, why) in zip(names, pool.map(self._compare, names), strict=True):
                yield from rows
                apart = sorted((row for row in rows if not row["equal"]), key=by_difference)
                counts = {"calls": len(rows), "equal": len(rows) - len(apart)}
                yield {"kind": "compared", "variant": name, **counts, "worst": apart[:SHOWN]}
                if why or not rows:
                    yield failure(name, why or "no call was compared")

    def _compare(self, name: str) -> tuple[list[Row], str]:
        try:
            done = subprocess.run(
                self.command(name), cwd=ROOT, capture_output=True, timeout=CHECK_SECONDS
            )
            out, why = done.stdout, ""
            if done.returncode:
                said = done.stderr.decode(errors="replace")[-600:]
                why = f"exit status {done.returncode}: {said}"
        except subprocess.TimeoutExpired as error:
            out, why = error.stdout or b"", f"it did not end within {CHECK_SECONDS} seconds"
        lines = out.decode(errors="replace").splitlines(keepends=True)
        # A process that was ended may leave half a line.
        rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]
        return [{"kind": "numbers", "variant": name, **row} for row in rows], why

    def command(self, name: str) -> list[str]:
        """Command that compares a variant, run at the repository's root, where `tests` can be
        imported."""
        folders = (self.cubins, self.sources[BASE], self.sources[name])
        return [sys.executable, "-m", "benchmarks.kernel_numbers", *map(str, folders)]

    def time(self, names: list[str], rounds: int) -> Iterator[Row]:
        variants = Variants({name: self.sources[name] for name in names}, self.cubins)
        for shape in (SHAPES["mochi"], SHAPES["cogx2b"]):
            yield from time_shape(variants, names, shape, rounds)
            torch.cuda.empty_cache()


def failure(name: str, why: str) -> Row:
    return {"kind": "failed", "variant": name, "why": why}


def by_difference(row: Row) -> float:
    return -math.inf if row["most"] is None else -row["most"]


def time_shape(variants: Variants, names: list[str], shape: Shape, rounds: int) -> Iterator[Row]:
    qkv = draw(shape)
    for density, mode in TIMED:
        case = next(case for case in modes(shape, density, 0.0, "cuda") if case.name == mode)
        stats = AttentionStats("cuda")
        case.attend(qkv, stats=stats)
        work = partial(case.attend, qkv, out_layout="NHD")
        facts = {"shape": shape.name, "case": f"{mode}, {density:.0%}"}
        times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for turn, name in in_rounds(names, rounds):
            with variants.using(name):
                call, stages = median_ms(work, repeats=7, warm_up=2), stage_ms(work, 5)
            found = {"attend": stages["attend"], "stages": sum(stages.values()), "call": call}
            times[name].append({f"{what}_ms": round(ms, 4) for what, ms in found.items()})
            yield {"kind": "timing", "variant": name, **facts, "round": turn, **times[name][-1]}
        for row in summaries(times):
            yield {"kind": "summary", **row, **facts, "density": round(stats.density, 4)}


def summaries(times: dict[str, list[dict[str, float]]]) -> Iterator[Row]:
    """Medians over the rounds, and what each variant gained over the base."""
    medians = {
        name: {what: statistics.median(row[what] for row in rows) for what in rows[0]}
        for name, rows in times.items()
    }
    for name, found in medians.items():
        gains = {
            f"{part}_gain": round(medians[BASE][f"{part}_ms"] / found[f"{part}_ms"] - 1, 4)
            for part in ("attend", "call")
        }
        yield {"variant": name, **found, **gains}


def told(row: Row) -> str:
    """Line that a reader at the screen needs of a row; empty for most."""
    name = row["variant"]
    if row["kind"] == "failed":
        return f"{name}: FAILED, not timed: {row['why']}"
    if row["kind"] == "build" and row.get("spills"):
        return f"{name}: {row['spec']} spills {row['spills']} bytes"
    if row["kind"] == "compared":
        differ = [
            f"\n    {x['case']}: {x['most']} (base repeatable: {x['repeatable']})"
            for x in row["worst"]
        ]
        return f"{name}: {row['equal']} of {row['calls']} calls equal bit by bit{''.join(differ)}"
    if row["kind"] == "summary":
        return (
            f"{row['shape']:7} {row['case']:20} {name:12} "
            f"attend {row['attend_ms']:8.3f} ({row['attend_gain']:+.1%})  "
            f"stages {row['stages_ms']:8.3f}  call {row['call_ms']:8.3f} ({row['call_gain']:+.1%})"
        )
    return ""


def passing(rows: Iterator[Row], names: list[str]) -> Generator[Row, None, list[str]]:
    """Hands the rows on; returns the names of which none says that they failed."""
    failed = set()
    for row in rows:
        if row["kind"] == "failed":
            failed.add(row["variant"])
        yield row
    return [name for name in names if name not in failed]


def rows_of(run: Run, build_only: bool, rounds: int) -> Iterator[Row]:
    """Rows of all phases. A variant that fails in one phase is left out of the next."""
    names = yield from passing(run.build(), list(run.sources))
    if build_only or BASE not in names or names == [BASE]:
        return
    names = yield from passing(run.compare(names[1:]), names)
    if names != [BASE]:
        yield from run.time(names, rounds)


def check_overlays(parser: argparse.ArgumentParser, overlays: Sequence[Path]) -> None:
    """Ends with a sentence where overlays are no folders or share a name."""
    for path in overlays:
        if not path.is_dir():
            parser.error(f"{path} is no folder")
    names = [BASE, *(path.resolve().name for path in overlays)]
    if len(set(names)) < len(names):
        parser.error(f"variants need names of their own, other than {BASE}: {', '.join(names)}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("overlays", type=Path, nargs="*", metavar="OVERLAY")
    parser.add_argument("--base", type=Path, default=CSRC, help="another csrc")
    parser.add_argument("--build-only", action="store_true", help="needs no GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results / "new_variants.jsonl")
    options = parser.parse_args(arguments)
    check_overlays(parser, options.overlays)
    if not (options.base / f"{HOPPER_ATTEND}.cu").is_file():
        parser.error(f"{options.base} is no csrc: it has no {HOPPER_ATTEND}.cu")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    facts = {"commit": options.commit}
    if not options.build_only:
        require_hopper()
        facts |= {"gpu": gpu_name(), "torch": torch.__version__}
    overlays = {path.resolve().name: path for path in options.overlays} or {REPOSITORY: None}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        sources = {BASE: overlaid(options.base, None, at / "csrc" / BASE)}
        for name, path in overlays.items():
            sources[name] = overlaid(CSRC, path, at / "csrc" / name)
        for row in rows_of(Run(sources, at / "cubins"), options.build_only, options.rounds):
            rows.append(row | facts)
            if line := told(row):
                print(line, flush=True)
                write_rows(options.out, rows)  # a run cut short leaves something
    write_rows(options.out, rows)
    print(f"# {len(rows)} rows in {options.out}")
    return int(any(row["kind"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
