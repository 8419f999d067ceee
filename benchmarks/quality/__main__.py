# SPDX-License-Identifier: Apache-2.0
"""Errors of sparse attention on real activations, 8-bit included; a JSON line a mode and density.

python -m benchmarks.quality --data dino [--video FILE | --seed N] [--weights FILE]
python -m benchmarks.quality --data smollm [--weights FILE] [--tokens N] [--perplexity 0.2]
python -m benchmarks.quality --data dit [--weights FILE] [--seed N]

Each mode runs in the reference emulation of the kernels, and where a GPU has them and
`sparge.attention` can express the mode, in the kernels too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality import on_gpu
from benchmarks.quality.data import DataSet, load
from benchmarks.quality.judge import Call, Sample
from benchmarks.quality.modes import BY_NAME, MODES, Mode
from benchmarks.quality.rows import RESULTS, Row, write
from benchmarks.quality.study import Attend, Study, emulated
from benchmarks.quality_data.wheel import WeightsMissingError
from benchmarks.timing import commit, gpu_name
from sparge.plan.budget import HeadBudget

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
EMULATION = "emulation"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("dino", "smollm", "dit"), required=True)
    parser.add_argument("--weights", type=Path, help="the weights' file, or the wheel it is in")
    parser.add_argument("--video", type=Path, help="for dino; by default a clip made from --seed")
    parser.add_argument("--seed", type=int, default=0, help="of the clip and of the samples")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text for smollm")
    parser.add_argument("--modes", nargs="+", choices=BY_NAME, default=[m.name for m in MODES])
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    parser.add_argument("--layers", nargs="+", type=int, default=[], help="all by default")
    parser.add_argument("--blocks", type=int, default=8, help="query blocks a call to judge by")
    parser.add_argument("--calibration-blocks", type=int, default=16, help="and to calibrate on")
    parser.add_argument("--perplexity", nargs="*", type=float, default=[], help="densities, smollm")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="to write into the rows")
    options = parser.parse_args(arguments)
    if options.perplexity and options.layers:
        parser.error("--perplexity needs every layer: leave out --layers.")
    try:
        data = load(options)
    except WeightsMissingError as missing:
        parser.exit(1, f"{missing}\n")
    modes = [BY_NAME[name] for name in options.modes]
    study = Study(data, modes, options.blocks, options.calibration_blocks, options.seed)
    places = _places(modes, data)
    for density in sorted({*options.densities, *options.perplexity}):
        for mode in modes:
            for where, run in places[mode.name].items():
                row = study.row(mode, density, run) | {"where": where}
                if where == EMULATION and density in options.perplexity:
                    row |= study.perplexity(mode, density)
                _report(options.out, row | {"commit": options.commit or commit()})


def in_kernels(mode: Mode, call: Call, budget: HeadBudget, judged: Sample) -> tuple[Tensor, Tensor]:
    return on_gpu.attend(call, float(budget.density[0]), judged)


def _places(modes: list[Mode], data: DataSet) -> dict[str, dict[str, Attend]]:
    """Where each mode runs; what the kernels leave out is said, not faked."""
    places: dict[str, dict[str, Attend]] = {mode.name: {EMULATION: emulated} for mode in modes}
    reason = on_gpu.unusable()
    if reason:
        print(f"Emulation only: {reason}")
        return places
    has_grid = data.judged[0].layer.grid is not None
    for mode in modes:
        reason = on_gpu.why_not(mode, has_grid)
        if reason:
            print(f"{mode.name} not in the kernels: {reason}")
        else:
            places[mode.name][gpu_name()] = in_kernels
    return places


def _report(path: Path, row: Row) -> None:
    write(path, [row])
    figures = [f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float)]
    print(f"{row['data']} | {row['mode']} | {row['where']} | {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
