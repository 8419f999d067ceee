# SPDX-License-Identifier: Apache-2.0
"""Seconds and memory of a denoising call in real ComfyUI, without the node and with it.

COMFYUI_DIR=<checkout> python -m benchmarks.comfyui_call [--models mochi,flux] [--topk 0.5 0.2]
    [--mode "auto budget"] [--residual .5] [--again] [--start-percent .2]
COMFYUI_DIR=<checkout> python -m benchmarks.comfyui_call --mode "auto quality" --quality high fast
COMFYUI_DIR=<checkout> python -m benchmarks.comfyui_call --limit-gib 12 16 24

The models have random weights, and the sampler is ComfyUI's own: Euler at cfg 1, one model call a
step. start_percent is 0, so that every call that can be is sparse; in an auto mode the first one is
dense and measured. Such a short run would save on token orders, or stay dense: here every order is
measured however short the run is, as in runs with the usual share of dense steps. Another
--start-percent makes a user's run of it, in which the node decides how much it measures, and
whether that pays: compare run_seconds, with --repeats 19 and --again.

seconds_per_call is the median of all calls but the first. In an auto mode calibration_s is what
measurements of the heads took in each of the calls, choosing_s what choosing for them did (both are
part of `seconds`), and calibration_share_of_dense_call the first call's part over seconds_per_call
without the node. With --mode "auto quality" the density is what the target error needs: topk has no
effect, and with random weights a target may need every pair.

With --residual each run is followed by two from its profile, in which just that share of the
measured heads has pooled keys: with random weights measuring says nothing about who would. In the
first of the two they have them in every second sparse step, as the node leaves them out of the
others; in the second in all steps, which the node never does.

With --again each run is made twice, and its figures are those of the second; first_run_seconds
tells what the first one in a process costs more. The memory cache is emptied before each, as
ComfyUI does between two prompts.

With --limit-gib a model of few blocks runs in that much GPU memory: the rest of the limit is held,
as weights would hold it, so that the dense path has just --headroom-gib to spare.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.comfyui_host import GIB, Host, Sampled
from benchmarks.comfyui_models import MODELS, VideoModel, build, tiny, with_depth
from benchmarks.comfyui_runs import node_runs
from benchmarks.timing import ROOT, commit


def measure_calls(host: Host, model: VideoModel, args: argparse.Namespace, write: Any) -> None:
    """Writes one line without the node, then one for each run with it."""
    patcher = build(model, host.device, args.dtype)
    dense: Sampled | None = None
    measured: Any = None
    for run in node_runs(args, profiles=True):
        inputs = run.widgets
        if run.residual is not None:
            asked = host.profile_with_residual(measured, run.residual)
            inputs = {**(inputs or {}), "profile": asked}
        sampled = [
            host.sample(model, patcher, inputs, 1 + args.repeats) for _ in range(1 + args.again)
        ]
        if run.residual is None:
            measured = host.last and host.last.profile
        line = timed(sampled, dense)
        if dense is None:
            dense = sampled[-1]
        else:
            line |= host.report(model.may_stay_dense or run.may_stay_dense)
            line["residual"] = host.residual_share()
            line["rel_l2_call"] = relative_l2(sampled[-1].first_call, dense.first_call)
            line["rel_l2_latent"] = relative_l2(sampled[-1].latent, dense.latent)
        write(model=model.name, shape=model.shape, config=run.name, **line)


def timed(sampled: list[Sampled], dense: Sampled | None) -> dict[str, Any]:
    """Figures of the last sampled run. dense: the run without the node, if this is another."""
    last = sampled[-1]
    line: dict[str, Any] = {
        "seconds_per_call": round(per_call(last), 4),
        "seconds": [round(seconds, 4) for seconds in last.seconds],
        "run_seconds": round(sum(last.seconds), 4),
    }
    if len(sampled) > 1:
        line["first_run_seconds"] = [round(seconds, 4) for seconds in sampled[0].seconds]
    if dense is not None and any(last.heads["calibration_s"]):
        share = max(last.heads["calibration_s"]) / per_call(dense)
        line |= {**last.heads, "calibration_share_of_dense_call": round(share, 4)}
    return line | {"weights_gib": round(last.held_gib, 3), "peak_gib": round(last.peak_gib, 3)}


def per_call(run: Sampled) -> float:
    return statistics.median(run.seconds[1:])


def measure_limits(host: Host, model: VideoModel, args: argparse.Namespace, write: Any) -> None:
    """Writes peaks in as much memory as a limit leaves beside the held rest; dense needs all but
    some."""
    patcher = build(model, host.device, args.dtype)
    host.sample(model, patcher, None, 1)
    needed = torch.cuda.max_memory_reserved(host.device) / GIB
    total = torch.cuda.get_device_properties(host.device).total_memory / GIB
    torch.cuda.empty_cache()
    for limit in args.limit_gib:
        torch.cuda.set_per_process_memory_fraction(limit / total, host.device)
        held_gib = max(0.0, limit - needed - args.headroom_gib)
        rest = torch.empty(int(held_gib * GIB), dtype=torch.uint8, device=host.device)
        for case in node_runs(args, profiles=False):
            line: dict[str, Any] = {"limit_gib": limit, "held_gib": round(held_gib, 3)}
            try:
                run = host.sample(model, patcher, case.widgets, 1)
            except torch.OutOfMemoryError as error:
                line |= {"outcome": "out of memory", "error": str(error).splitlines()[0]}
            else:
                line |= {
                    "outcome": "finished",
                    "peak_gib": round(run.peak_gib, 3),
                    "peak_gib_without_held": round(run.peak_gib - held_gib, 3),
                    "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3),
                }
                if case.widgets is not None:
                    line |= host.report(model.may_stay_dense or case.may_stay_dense)
            write(model=model.name, shape=model.shape, config=case.name, **line)
        del rest
        torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0, host.device)


def relative_l2(got: Tensor, expected: Tensor) -> float:
    return round(float((got - expected).norm() / expected.norm()), 5)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="mochi,cogvideox,wan")
    parser.add_argument("--topk", type=float, nargs="+", default=[0.5])
    parser.add_argument("--mode", default="manual", help="of the node: manual, auto budget ...")
    parser.add_argument("--quality", nargs="+", default=["balanced"], help="of auto quality")
    parser.add_argument("--pvthreshd", type=float, default=15.0)
    parser.add_argument("--start-percent", type=float, default=0.0)
    parser.add_argument("--residual", type=float, help="share, in an auto mode")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls after one untimed")
    parser.add_argument("--again", action="store_true", help="each run twice; see above")
    parser.add_argument("--limit-gib", type=float, nargs="*", help="measure memory, not time")
    parser.add_argument("--headroom-gib", type=float, default=0.5)
    parser.add_argument("--blocks", type=int, default=4, help="of the model under a limit")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this script")
    parser.add_argument("--commit", default=None, help="where this copy has no git folder")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/comfyui_call.jsonl")
    args = parser.parse_args(arguments)
    if args.residual is not None and args.mode == "manual":
        parser.error("--residual is for auto modes: manual has no residual.")
    if args.residual is not None and args.start_percent:
        parser.error("--residual is for runs that measure in any case: leave --start-percent out.")
    return args


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
