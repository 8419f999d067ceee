# SPDX-License-Identifier: Apache-2.0
"""Errors of sparse attention on real activations, 8-bit included; a JSON line a mode and density.

python -m benchmarks.quality --data dino [--video FILE | --seed N] [--weights FILE]
python -m benchmarks.quality --data smollm [--weights FILE] [--tokens N] [--perplexity 0.2]
python -m benchmarks.quality --data dit [--weights FILE --called "dit of seed 1"] [--seed N]
    [--clips N] [--grid 9 16 14]
python -m benchmarks.quality --data dit --targets [high balanced fast .05] [--seed N] [--clips N]

Each mode runs in an emulation of the kernels, and with --kernels, which a GPU that has them turns
on, through `sparge.attention` too, as far as that can express the mode; with --no-emulation modes
that run there are not emulated. Calibration sees other query blocks of the very calls that dino is
judged on, the same text's next part for smollm, other steps for dit. The small video DiT gives
two tables: calls of a sampling run's sparse steps, and clips sampled in each mode against the same
clips sampled dense (the first 4 of 20 steps are dense in both, and calibration sees the last of
those); whole clips are emulated only in modes that do not run through `sparge.attention`. --grid
makes them small enough for a CPU. Clips are those of the scenes --seed, --seed + 1 and so on.

--targets samples clips as the node's mode auto quality does, a JSON line for each target error: by
name or number, the node's own three where none is given. Without --densities that is all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import sparge
from benchmarks.quality import end_to_end, library
from benchmarks.quality.data import DataSet, load
from benchmarks.quality.dit import of_model
from benchmarks.quality.end_to_end import Attending, Clips
from benchmarks.quality.modes import BY_NAME, MODES, Mode
from benchmarks.quality.rows import EMULATION, RESULTS, Row, write
from benchmarks.quality.study import Study, emulated
from benchmarks.quality.targets import TARGETS, target
from benchmarks.quality_data.wheel import WeightsMissingError
from benchmarks.timing import commit
from benchmarks.tiny_video_dit.curriculum import FULL_GRID
from sparge.tune import BLOCKS_A_CALL

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("dino", "smollm", "dit"), required=True)
    parser.add_argument("--weights", type=Path, help="the weights' file, or the wheel it is in")
    parser.add_argument(
        "--video",
        type=Path,
        help="for dino, or a .npz of its frames; by default a clip made from --seed",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the clip and of the samples")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text for smollm")
    parser.add_argument("--modes", nargs="+", choices=BY_NAME, default=[m.name for m in MODES])
    parser.add_argument("--densities", nargs="+", type=float, help=f"by default {DENSITIES}")
    parser.add_argument("--targets", nargs="*", type=target, help="target errors, dit")
    parser.add_argument("--layers", nargs="+", type=int, default=[], help="all by default")
    parser.add_argument("--blocks", type=int, default=8, help="query blocks a call to judge by")
    parser.add_argument(
        "--calibration-blocks",
        type=int,
        default=2 * BLOCKS_A_CALL,
        help="and to calibrate on; by default as many as a run with cond and uncond samples",
    )
    parser.add_argument("--perplexity", nargs="*", type=float, default=[], help="densities, smollm")
    parser.add_argument("--clips", type=int, default=2, help="whole clips to sample, dit")
    parser.add_argument("--grid", type=int, nargs=3, default=FULL_GRID, help="of tokens, dit")
    parser.add_argument("--clips-only", action="store_true", help="no table of calls, dit")
    parser.add_argument("--device", type=torch.device, default=_device())
    parser.add_argument("--called", default="dit", help="what rows call the weights, dit")
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--emulation", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="to write into the rows")
    options = parser.parse_args(arguments)
    if options.perplexity and options.layers:
        parser.error("--perplexity needs every layer: leave out --layers.")
    if options.data == "dit" and options.clips and options.layers:
        parser.error("clips run through every layer: leave out --layers, or give --clips 0.")
    if options.targets is not None and not (options.data == "dit" and options.clips):
        parser.error("--targets is for clips of dit.")
    if options.densities is None:
        options.densities = DENSITIES if options.targets is None else ()
    if options.targets == []:
        options.targets = list(TARGETS.values())
    if options.kernels is None:
        options.kernels = sparge.capabilities(options.device).usable
    try:
        data = load(options)
    except WeightsMissingError as missing:
        parser.exit(1, f"{missing}\n")
    modes = [BY_NAME[name] for name in options.modes]
    for mode in modes:
        if options.kernels and library.why_not(mode):
            print(f"{mode.name} not through sparge.attention: {library.why_not(mode)}")
    if not options.clips_only and (options.densities or options.perplexity):
        _judge_calls(data, modes, options)
    if data.runs and options.clips:
        _judge_clips(data, modes, options)


def _judge_calls(data: DataSet, modes: list[Mode], options: argparse.Namespace) -> None:
    study = Study(data, modes, options.blocks, options.calibration_blocks, options.seed)
    for density in sorted({*options.densities, *options.perplexity}):
        for mode in modes:
            by_kernels = options.kernels and not library.why_not(mode)
            if options.emulation or not by_kernels or density in options.perplexity:
                row = study.row(mode, density, emulated) | {"where": EMULATION}
                if density in options.perplexity:
                    row |= study.perplexity(mode, density)
                _report(row, options)
            if by_kernels:
                row = study.row(mode, density, library.attend_call)
                _report(row | {"where": library.where(options.device)}, options)


def _judge_clips(data: DataSet, modes: list[Mode], options: argparse.Namespace) -> None:
    clips = Clips(data.runs)
    for density in sorted(options.densities):
        for mode in modes:
            attending, where = _attending(mode, options)
            _report(clips.row(mode, density, attending) | {"where": where}, options)
    for asked in sorted(options.targets or ()):
        attending, where = _attending(BY_NAME["ours auto"], options)
        _report(clips.target_row(asked, attending) | {"where": where}, options)


def _attending(mode: Mode, options: argparse.Namespace) -> tuple[Attending, str]:
    """Returns what samples clips in a mode, and how rows call it."""
    if options.kernels and not library.why_not(mode):
        return end_to_end.in_library, library.where(options.device)
    return end_to_end.emulated, EMULATION


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _report(row: Row, options: argparse.Namespace) -> None:
    if options.data == "dit":
        row["data"] = of_model(row["data"], options.called)
    write(options.out, [row | {"commit": options.commit or commit()}])
    figures = [f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float)]
    print(f"{row['data']} | {row['mode']} | {row['where']} | {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
