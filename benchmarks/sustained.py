# SPDX-License-Identifier: Apache-2.0
"""Variants of the Hopper attend at the GPU's power limit: long rows of its launch alone, in turns.

    python -m benchmarks.sustained [--cases mochi:1,wan480:.2:budgets] [--rounds 6]
                                   [--seconds .25] [--out FILE] OVERLAY...

Overlays are those of `benchmarks.kernel_variants`, which compares numbers and times calls between
which the GPU rests. As in a model, it does not here: H100 and H200 are then held at 700 W, energy
decides, and clocks follow. A GPU is faster while it is cool, so it computes for some seconds
first; single rows differ by up to 2 % all the same, which is what the standard error is for.

One JSON object for each case and variant: variant, case, ms (mean of the rounds), rounds (ms of
each), gain and error (per cent by which it is faster than the base, and the standard error of
that), watts and mhz (as nvidia-smi says in the middle of the last row; null where it is absent).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparge.kernels.spec import HOPPER_ATTEND

from .attention import OURS, OURS_BUDGETS, modes
from .inputs import draw
from .kernel_variants import (
    BASE,
    CSRC,
    Variants,
    check_overlays,
    is_the_same,
    overlaid,
    require_hopper,
)
from .shapes import SHAPES
from .stages import ATTEND, watched_launches
from .timing import ROOT, commit, gpu_name, in_rounds, write_rows

CASES = "mochi:1,mochi:.2:budgets,wan480:.2:budgets,cogx2b:1,cogx2b:.2:budgets"
WARM_UP_SECONDS = 2.5

Launch = Callable[[], None]


@dataclass(frozen=True)
class Case:
    shape: str
    density: float
    mode: str

    @classmethod
    def parse(cls, text: str) -> Case:
        """Reads shape:density, or shape:density:budgets."""
        shape, density, *budgets = text.split(":")
        if shape not in SHAPES or budgets not in ([], ["budgets"]):
            raise ValueError(f"{text!r} is no case: write mochi:1 or wan480:.2:budgets.")
        return cls(shape, float(density), OURS_BUDGETS if budgets else OURS)

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.mode}, {self.density:.0%}"


def attend_launch(work: Callable[[], object]) -> Launch:
    """Launch of attend that can be repeated as the call does it: its buffers are free by then, but
    nothing else takes memory in the meantime."""
    launches: list[Launch] = []

    def note(stage: str, make: Launch) -> None:
        make()
        if stage == ATTEND:
            launches.append(make)

    with watched_launches(note):
        work()
    (launch,) = launches
    return launch


def row_ms(launch: Launch, calls: int, in_the_middle: Callable[[], None] | None = None) -> float:
    """Milliseconds a call, of so many calls without a pause."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        launch()
    end.record()
    if in_the_middle is not None:
        in_the_middle()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def state() -> dict[str, float | None]:
    """Watts and MHz of the GPU at work."""
    query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        watts, mhz = map(float, told.splitlines()[torch.cuda.current_device()].split(","))
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return {"watts": None, "mhz": None}
    return {"watts": watts, "mhz": mhz}


def measure(
    variants: Variants, names: Sequence[str], case: Case, rounds: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yields the row of each variant."""
    shape = SHAPES[case.shape]
    qkv = draw(shape)
    found = next(x for x in modes(shape, case.density, 0.0, "cuda") if x.name == case.mode)
    launches = {}
    for name in names:
        with variants.using(name):
            launches[name] = attend_launch(partial(found.attend, qkv, out_layout="NHD"))
    calls = max(3, round(1000 * seconds / row_ms(launches[BASE], 5)))
    until = time.monotonic() + WARM_UP_SECONDS
    while time.monotonic() < until:
        row_ms(launches[BASE], calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    states: dict[str, dict[str, float | None]] = {}
    for _, name in in_rounds(names, rounds):
        row_ms(launches[name], max(1, calls // 3))  # the clocks of another are not its own

        def look(name: str = name) -> None:
            time.sleep(seconds / 3)
            states[name] = state()

        times[name].append(row_ms(launches[name], calls, look))
    for name in names:
        compared = beside(times[BASE], times[name])
        yield {"variant": name, "case": case.name, **compared, **states[name]}


def beside(base: Sequence[float], own: Sequence[float]) -> dict[str, Any]:
    """Mean and rounds, gain over the base and its standard error, by rounds."""
    gains = [100 * (one / other - 1) for one, other in zip(base, own, strict=True)]
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
    return {
        "ms": round(statistics.mean(own), 4),
        "rounds": [round(ms, 4) for ms in own],
        "gain": round(100 * (statistics.mean(base) / statistics.mean(own) - 1), 2),
        "error": None if error is None else round(error, 2),
    }


def rows_of(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    sources = {BASE: overlaid(CSRC, None, folder / "csrc" / BASE)}
    for path in options.overlays:
        name = path.resolve().name
        sources[name] = overlaid(CSRC, path, folder / "csrc" / name)
        if is_the_same(sources[name], CSRC):
            raise SystemExit(f"{path} changes nothing that {HOPPER_ATTEND}.cu includes.")
    variants = Variants(sources, folder / "cubins")
    for case in options.cases:
        yield from measure(variants, list(sources), case, options.rounds, options.seconds)
        torch.cuda.empty_cache()


def parsed(cases: str) -> list[Case]:
    """Cases of the command line, which shows a user the sentence of this error alone."""
    try:
        return [Case.parse(text) for text in cases.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("overlays", type=Path, nargs="+", metavar="OVERLAY")
    parser.add_argument("--cases", type=parsed, default=CASES, help="with commas between them")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.25, help="of each row")
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results / "new_sustained.jsonl")
    options = parser.parse_args(arguments)
    check_overlays(parser, options.overlays)
    require_hopper()
    facts = {"gpu": gpu_name(), "torch": torch.__version__, "commit": options.commit}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of(options, Path(folder)):
            rows.append(row | facts)
            print(
                f"{row['case']:24} {row['variant']:12} {row['ms']:8.4f} ms {row['gain']:+6.2f} % "
                f"(error {row['error']}), {row['watts']} W, {row['mhz']} MHz",
                flush=True,
            )
            write_rows(options.out, rows)  # a run cut short leaves something
    print(f"# {len(rows)} rows in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
