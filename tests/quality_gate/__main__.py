# SPDX-License-Identifier: Apache-2.0
"""The quality gate by hand: a table, with each mechanism switched off, and new floors.

python -m tests.quality_gate [--trained FILE] [--off all | NAME ...] [--store]

--off: also with these mechanisms off, one at a time. --store: what is found becomes the floors of
this kind of machine; not with --trained.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from .gate import FEW, FULL, SMALL, Found, Gate, dropped
from .mechanisms import MECHANISMS


def line(name: str, found: dict[str, Found], seconds: float) -> str:
    cells = (f"{aim}: {f.psnr:.2f} dB at {f.density:.3f}" for aim, f in found.items())
    return f"{name:22} {' | '.join(cells)}  ({seconds:.0f} s)"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trained", type=Path, help="weights of another small video DiT")
    parser.add_argument("--off", nargs="+", default=[], choices=["all", *MECHANISMS])
    parser.add_argument("--store", action="store_true")
    options = parser.parse_args()
    few = [] if options.trained else FEW.values()
    for gate in [FULL, *few] if torch.cuda.is_available() else [SMALL]:
        report(gate, options)


def report(gate: Gate, options: argparse.Namespace) -> None:
    clips = gate.dense(options.trained)
    began = time.perf_counter()
    found = gate.found(clips)
    print(line(gate.name, found, time.perf_counter() - began), flush=True)
    if options.store and options.trained is None:
        gate.store(found)
    for density in gate.budgets:
        print(f"drop at {density:g}: {dropped(clips, density).psnr:.2f} dB", flush=True)
    for name in MECHANISMS if "all" in options.off else options.off:
        began = time.perf_counter()
        with MECHANISMS[name]():
            print(line(f"no {name}", gate.found(clips), time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
