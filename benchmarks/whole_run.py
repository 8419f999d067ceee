# SPDX-License-Identifier: Apache-2.0
"""Seconds and memory of whole sampling runs in real ComfyUI, without the node and with it.

COMFYUI_DIR=<checkout> python -m benchmarks.whole_run [--models mochi,flux] [--topk 0.2]
    [--mode "auto budget"] [--again] [--start-percent 0.2] [--steps 20]
COMFYUI_DIR=<checkout> python -m benchmarks.whole_run --mode "auto quality" --quality high fast

The models have random weights, and the sampler is ComfyUI's own: Euler at cfg 1, one model call a
step. run_seconds is the sum over the calls, ratio that of the run without the node over it.
seconds_per_call is the median of all calls but the first. With --mode "auto quality" the density is
what the target error needs: topk has no effect, and with random weights a target may need every
pair.

With --start-percent 0 and few steps it times sparse calls: in an auto mode the first one is dense
and measured. Such a short run would save on token orders, or stay dense: here every order is
measured however short the run is.

With --again each run is made twice, and its figures are those of the second; first_run_seconds
tells what the first one in a process costs more. The memory cache is emptied before each, as
ComfyUI does between two prompts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.comfyui_host import Host, Sampled
from benchmarks.comfyui_models import MODELS, VideoModel, build
from benchmarks.timing import ROOT, commit

AUTO_QUALITY = "auto quality"


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
    common = {"mode": args.mode, "pvthreshd": args.pvthreshd, "start_percent": args.start_percent}
    if args.tiny:
        common["min_tokens"] = 100
    if args.mode == AUTO_QUALITY:
        for quality in args.quality:
            yield NodeRun(f"{AUTO_QUALITY}, {quality}", {**common, "quality": quality}, True)
        return
    kind = "topk" if args.mode == "manual" else args.mode
    for topk in args.topk:
        name = f"{kind} {topk:g}, pvthreshd {args.pvthreshd:g}"
        yield NodeRun(name, {**common, "topk": topk}, args.start_percent > 0)


def measure_calls(host: Host, model: VideoModel, args: argparse.Namespace, write: Any) -> None:
    """Writes one line without the node, then one for each run with it."""
    patcher = build(model, host.device, args.dtype)
    dense: Sampled | None = None
    for run in node_runs(args):
        sampled = [
            host.sample(model, patcher, run.widgets, args.steps) for _ in range(1 + args.again)
        ]
        line = timed(sampled)
        if dense is None:
            dense = sampled[-1]
        else:
            line |= host.report(model.may_stay_dense or run.may_stay_dense)
            line["default_run_seconds"] = default = round(sum(dense.seconds), 4)
            line["ratio"] = round(default / line["run_seconds"], 3)
            line["rel_l2_call"] = relative_l2(sampled[-1].first_call, dense.first_call)
            line["rel_l2_latent"] = relative_l2(sampled[-1].latent, dense.latent)
        write(model=model.name, shape=model.shape, config=run.name, **line)


def timed(sampled: list[Sampled]) -> dict[str, Any]:
    """Figures of the last sampled run."""
    last = sampled[-1]
    line: dict[str, Any] = {
        "seconds_per_call": round(statistics.median(last.seconds[1:]), 4),
        "seconds": [round(seconds, 4) for seconds in last.seconds],
        "run_seconds": round(sum(last.seconds), 4),
    }
    if len(sampled) > 1:
        line["first_run_seconds"] = [round(seconds, 4) for seconds in sampled[0].seconds]
    return line | {"weights_gib": round(last.held_gib, 3), "peak_gib": round(last.peak_gib, 3)}


def relative_l2(got: Tensor, expected: Tensor) -> float:
    return round(float((got - expected).norm() / expected.norm()), 5)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="mochi,cogvideox,wan,flux")
    parser.add_argument("--topk", type=float, nargs="+", default=[0.2])
    parser.add_argument(
        "--mode", default="auto budget", help="of the node: manual, auto budget ..."
    )
    parser.add_argument("--quality", nargs="+", default=["balanced"], help="of auto quality")
    parser.add_argument("--pvthreshd", type=float, default=15.0)
    parser.add_argument("--start-percent", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--again", action="store_true", help="each run twice; see above")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this script")
    parser.add_argument("--commit", default=None, help="where this copy has no git folder")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/new.jsonl")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    host = Host(os.environ["COMFYUI_DIR"])
    if not args.start_percent:
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
        text = json.dumps(line | facts)
        print(text, flush=True)
        with args.out.open("a", encoding="utf-8") as out:
            out.write(text + "\n")

    if on_gpu:
        write(config="kernel warm-up", seconds=round(host.warm_up_seconds(), 2))
    for name in args.models.split(","):
        model = MODELS[name].made_tiny() if args.tiny else MODELS[name]
        measure_calls(host, model, args, write)
        host.forget()


if __name__ == "__main__":
    main()
