# SPDX-License-Identifier: Apache-2.0
"""Seconds and memory of whole sampling runs in real ComfyUI, without the node and with it.

COMFYUI_DIR=<checkout> python -m benchmarks.whole_run [--models mochi,flux] [--topk 0.2]
    [--mode "auto quality" --quality high fast] [--again] [--start-percent 0.2 0.1] [--steps 20]
COMFYUI_DIR=<checkout> python -m benchmarks.whole_run --models wan22 --cfg 3.5 [--one-by-one]
    [--frames 61]
COMFYUI_DIR=<checkout> python -m benchmarks.whole_run --models wan --with easycache compile int8 fp8

The models have random weights, and the sampler is ComfyUI's own: Euler. run_seconds is the time of
all sampling, ratio that of the default run over it: no node, no companion. seconds has each model
call, seconds_per_call is the median of all but the first. At a cfg above 1 a step is one call where
ComfyUI has the memory for both prompts in one batch; --one-by-one has them in two. In auto quality
the density is what the target error needs: with random weights that may be every pair.

With --start-percent 0 and few steps it times sparse calls: in an auto mode the first one is dense
and measured. So short a run would save on token orders, or stay dense: here each is measured.

With --again each run with the node is made twice, as one who queues a graph twice does, and its
figures are those of the second; first_run_seconds tells what the first one in a process costs more.
The default run has a run of two steps before it. The memory cache is emptied before each, as
ComfyUI does between two prompts.

Each companion of --with runs without the node and with it; torch.compile's figures are of a second
run. Of random weights EasyCache's choice of steps means nothing: give a --reuse-threshold at which
it skips as many as wanted. skipped_steps is what it skipped: calls of no time. Where a row has
"refused", ComfyUI did something else than it was asked to.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import companions
from benchmarks.comfyui_host import Host, Sampled, Sampling
from benchmarks.comfyui_models import MODELS, VideoModel, build
from benchmarks.companions import ALONE, COMPILED, FP8, Companion
from benchmarks.timing import ROOT, add_row, commit

AUTO_QUALITY = "auto quality"
COMPANIONS = ("easycache", "compile", "int8", "sage", "fp8")
WARM_UP_STEPS = 2  # before a default run of --again, whose first steps tell nothing of ours


@dataclass(frozen=True)
class NodeRun:
    """Run with these widgets of the node; without the node where they are None."""

    name: str
    widgets: dict[str, Any] | None = None
    may_stay_dense: bool = False
    """Random weights may need every pair for a target error, and a short run may not pay."""


def node_runs(args: argparse.Namespace) -> Iterator[NodeRun]:
    """Yields the runs, first the one without the node. As a rule every step is sparse: the share of
    dense steps is the user's choice."""
    yield NodeRun("default")
    common = {"mode": args.mode, "pvthreshd": args.pvthreshd}
    if args.tiny:
        common["min_tokens"] = 100
    kind = "topk" if args.mode == "manual" else args.mode
    for start in args.start_percent:
        common["start_percent"] = start
        if args.mode == AUTO_QUALITY:
            for quality in args.quality:
                yield NodeRun(f"{AUTO_QUALITY}, {quality}", {**common, "quality": quality}, True)
            continue
        for topk in args.topk:
            name = f"{kind} {topk:g}, pvthreshd {args.pvthreshd:g}"
            yield NodeRun(name, {**common, "topk": topk}, start > 0)


def measure_calls(host: Host, model: VideoModel, args: argparse.Namespace, write: Any) -> None:
    """Writes a line for each run, first those without the node; all of that for each companion."""
    patchers = build(model, host.device, args.dtype)
    default, default_seconds = None, 0.0
    for companion in chosen_companions(args):
        if companion is FP8:
            patchers.clear()
            host.forget()
            patchers = build(model, host.device, args.dtype, fp8=True)
        for run in node_runs(args):
            sampling = Sampling(args.steps, args.cfg, args.one_by_one)
            if run.widgets is None and args.again:
                host.sample(
                    model, patchers, replace(sampling, steps=WARM_UP_STEPS), None, companion
                )
            runs = 1 + ((args.again and run.widgets is not None) or companion is COMPILED)
            sampled = host.sample(model, patchers, sampling, run.widgets, companion, runs)
            line = timed(sampled)
            line |= {"steps": args.steps, "cfg": args.cfg} | host.remarks()
            if run.widgets is not None:
                line["start_percent"] = run.widgets["start_percent"]
                line |= host.report(model.may_stay_dense or run.may_stay_dense)
            if default is None:
                default, default_seconds = sampled[-1], line["run_seconds"]
            else:
                line["default_run_seconds"] = default_seconds
                line["default_peak_gib"] = round(default.peak_gib, 3)
                line["ratio"] = round(default_seconds / line["run_seconds"], 3)
                line["rel_l2_call"] = relative_l2(sampled[-1].first_call, default.first_call)
                line["rel_l2_latent"] = relative_l2(sampled[-1].latent, default.latent)
            config = " + ".join(filter(None, [run.name, companion.name]))
            write(model=model.name, shape=model.shape, config=config, **line)


def chosen_companions(args: argparse.Namespace) -> Iterator[Companion]:
    """Yields none and then those of --with."""
    yield ALONE
    if "easycache" in args.companions:
        yield companions.easycache(args.reuse_threshold)
    if "compile" in args.companions:
        yield COMPILED
    if "int8" in args.companions:
        yield companions.INT8
    if "sage" in args.companions:
        yield companions.SAGE
    if "fp8" in args.companions:  # the last one, for it takes another model
        yield FP8


def timed(sampled: list[Sampled]) -> dict[str, Any]:
    """Figures of the last sampled run."""
    last = sampled[-1]
    line: dict[str, Any] = {
        "seconds_per_call": round(statistics.median(last.seconds[1:]), 4),
        "seconds": [round(seconds, 4) for seconds in last.seconds],
        "run_seconds": round(last.run_seconds, 4),
    }
    if len(sampled) > 1:
        line["first_run_seconds"] = [round(seconds, 4) for seconds in sampled[0].seconds]
        line["first_wall_seconds"] = round(sampled[0].run_seconds, 4)
    return line | {"weights_gib": round(last.held_gib, 3), "peak_gib": round(last.peak_gib, 3)}


def relative_l2(got: Tensor, expected: Tensor) -> float:
    return round(float((got - expected).norm() / expected.norm()), 5)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="mochi,cogvideox,wan,flux", help=", ".join(MODELS))
    parser.add_argument("--topk", type=float, nargs="+", default=[0.2])
    parser.add_argument(
        "--mode", default="auto budget", help="of the node: manual, auto budget ..."
    )
    parser.add_argument("--quality", nargs="+", default=["balanced"], help="of auto quality")
    parser.add_argument("--pvthreshd", type=float, default=50.0)
    parser.add_argument("--start-percent", type=float, nargs="+", default=[0.2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--frames", type=int, help="of the latent, instead of the model's own")
    parser.add_argument("--cfg", type=float, default=1.0)
    parser.add_argument("--one-by-one", action="store_true", help="prompts in calls of their own")
    parser.add_argument("--with", nargs="+", choices=COMPANIONS, default=[], dest="companions")
    parser.add_argument("--reuse-threshold", type=float, default=0.2, help="of EasyCache")
    parser.add_argument("--again", action="store_true", help="each run twice; see above")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this script")
    parser.add_argument("--commit", default=None, help="where this copy has no git folder")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/new.jsonl")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    host = Host(os.environ["COMFYUI_DIR"])
    if 0 in args.start_percent:
        host.measure_in_any_case()
    on_gpu = host.device.type == "cuda"
    args.dtype = torch.bfloat16 if on_gpu else torch.float32
    facts = {
        "gpu": torch.cuda.get_device_name(host.device) if on_gpu else "none",
        "commit": args.commit or commit(),
        "torch": torch.__version__,
        "comfyui": host.version,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def write(**line: Any) -> None:
        add_row(line | facts, args.out)

    if on_gpu:
        write(config="kernel warm-up", seconds=round(host.warm_up_seconds(), 2))
    for name in args.models.split(","):
        model = MODELS[name].made_tiny() if args.tiny else MODELS[name]
        if args.frames:
            channels, _, *size = model.latent
            if len(size) != 2:
                raise SystemExit(f"{name} has no frames: leave out --frames or this model.")
            shape = f"{args.frames} latent frames of {model.shape}"
            model = replace(model, shape=shape, latent=[channels, args.frames, *size])
        measure_calls(host, model, args, write)
        host.forget()


if __name__ == "__main__":
    main()
