# SPDX-License-Identifier: Apache-2.0
"""Seconds and memory of a denoising call in real ComfyUI, without the node and with it.

COMFYUI_DIR=<checkout> python -m benchmarks.comfyui_call [--models mochi,flux] [--topk 0.5 0.2]
                                                         [--mode "auto budget"]
COMFYUI_DIR=<checkout> python -m benchmarks.comfyui_call --limit-gib 12 16 24

In an auto mode the first call is dense and measured: the first of the seconds. The others count.
With --residual the same heads are run once more from a profile, in which that share of those with
the residual keeps it: with random weights nine of ten heads of Mochi have it, hardly one of Wan.

The models have random weights, and the sampler is ComfyUI's own. With --limit-gib a model of few
blocks runs in that much GPU memory: the rest of the limit is held, as weights would hold it, so
that the dense path has just --headroom-gib to spare.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.comfyui_host import GIB, Host, Sampled
from benchmarks.comfyui_models import MODELS, VideoModel, build, tiny, with_depth
from benchmarks.timing import ROOT, commit


def measure_calls(host: Host, model: VideoModel, args: argparse.Namespace, write: Any) -> None:
    """One line without the node, one for each topk with it."""
    patcher = build(model, host.device, args.dtype)
    dense: Sampled | None = None
    for topk, residual in runs(args):
        inputs = widgets(args, topk)
        if residual is not None:
            inputs = {**(inputs or {}), "profile": host.profile_with_residual(residual)}
        run = host.sample(model, patcher, inputs, 1 + args.repeats)
        line: dict[str, Any] = {
            "seconds_per_call": round(statistics.median(run.seconds[1:]), 4),
            "seconds": [round(seconds, 4) for seconds in run.seconds],
            "weights_gib": round(run.held_gib, 3),
            "peak_gib": round(run.peak_gib, 3),
        }
        if dense is None:
            dense = run
        else:
            line |= host.report(model.may_stay_dense) | {"residual": host.residual_share()}
            line["rel_l2_call"] = relative_l2(run.first_call, dense.first_call)
            line["rel_l2_latent"] = relative_l2(run.latent, dense.latent)
        config = config_name(args, topk, residual)
        write(model=model.name, shape=model.shape, config=config, **line)


def measure_limits(host: Host, model: VideoModel, args: argparse.Namespace, write: Any) -> None:
    """Peaks in as much memory as a limit leaves beside the held rest; dense needs all but some."""
    patcher = build(model, host.device, args.dtype)
    host.sample(model, patcher, None, 1)
    needed = torch.cuda.max_memory_reserved(host.device) / GIB
    total = torch.cuda.get_device_properties(host.device).total_memory / GIB
    torch.cuda.empty_cache()
    for limit in args.limit_gib:
        torch.cuda.set_per_process_memory_fraction(limit / total, host.device)
        held_gib = max(0.0, limit - needed - args.headroom_gib)
        rest = torch.empty(int(held_gib * GIB), dtype=torch.uint8, device=host.device)
        for topk in (None, *args.topk):
            line: dict[str, Any] = {"limit_gib": limit, "held_gib": round(held_gib, 3)}
            try:
                run = host.sample(model, patcher, widgets(args, topk), 1)
            except torch.OutOfMemoryError as error:
                line |= {"outcome": "out of memory", "error": str(error).splitlines()[0]}
            else:
                line |= {
                    "outcome": "finished",
                    "peak_gib": round(run.peak_gib, 3),
                    "peak_gib_without_held": round(run.peak_gib - held_gib, 3),
                    "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3),
                }
                if topk is not None:
                    line |= host.report(model.may_stay_dense)
            write(model=model.name, shape=model.shape, config=config_name(args, topk), **line)
        del rest
        torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0, host.device)


def runs(args: argparse.Namespace) -> Iterator[tuple[float | None, float | None]]:
    """topk, and the share of heads with the residual where a profile says it."""
    yield None, None
    for topk in args.topk:
        yield topk, None
        if args.residual is not None:
            yield topk, args.residual


def relative_l2(got: Tensor, expected: Tensor) -> float:
    return round(float((got - expected).norm() / expected.norm()), 5)


def widgets(args: argparse.Namespace, topk: float | None) -> dict[str, Any] | None:
    """None without the node. Every step sparse: the share of dense steps is the user's choice."""
    if topk is None:
        return None
    tokens = {"min_tokens": 100} if args.tiny else {}
    numbers = {"topk": topk, "pvthreshd": args.pvthreshd, "start_percent": 0.0}
    return {"mode": args.mode, **numbers, **tokens}


def config_name(args: argparse.Namespace, topk: float | None, residual: float | None = None) -> str:
    if topk is None:
        return "default"
    mode = "topk" if args.mode == "manual" else args.mode
    name = f"{mode} {topk:g}, pvthreshd {args.pvthreshd:g}"
    return name if residual is None else f"{name}, residual in {residual:g}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--models", default="mochi,cogvideox,wan")
    parser.add_argument("--topk", type=float, nargs="+", default=[0.5])
    parser.add_argument("--mode", default="manual", help="of the node: manual, auto budget ...")
    parser.add_argument("--pvthreshd", type=float, default=15.0)
    parser.add_argument("--residual", type=float, help="share, in an auto mode")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls after one untimed")
    parser.add_argument("--limit-gib", type=float, nargs="*", help="measure memory, not time")
    parser.add_argument("--headroom-gib", type=float, default=0.5)
    parser.add_argument("--blocks", type=int, default=4, help="of the model under a limit")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this script")
    parser.add_argument("--commit", default=None, help="where this copy has no git folder")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/comfyui_call.jsonl")
    args = parser.parse_args()
    if args.residual is not None and args.mode == "manual":
        parser.error("--residual is for auto modes: manual has no residual.")
    return args


def main() -> None:
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    host = Host(os.environ["COMFYUI_DIR"])
    host.measure_all_walks()
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
        cache = os.environ.get("SPARGE_CACHE")
        cold = cache is not None and not any(Path(cache).glob("*.cubin"))
        write(config="kernel warm-up", cold=cold, seconds=round(host.warm_up_seconds(), 2))
    for name in args.models.split(","):
        model = tiny(MODELS[name]) if args.tiny else MODELS[name]
        if args.limit_gib:
            measure_limits(host, with_depth(model, args.blocks), args, write)
        else:
            measure_calls(host, model, args, write)
        host.forget()


if __name__ == "__main__":
    main()
