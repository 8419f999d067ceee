# SPDX-License-Identifier: Apache-2.0
"""Clips of the small video DiT by ComfyUI's own sampler: PSNR with sparse attention against dense.

COMFYUI_DIR=<checkout> python -m benchmarks.tiny_video_dit.comfyui_clip
    [--weights FILE --called "dit of seed 1"] [--modes drop "ours manual" "ours auto"]
    [--densities 0.1 0.2 0.3 0.5] [--clips 2] [--with easycache [--reuse-threshold 0.2]]

20 steps of Euler at cfg 1, the first 4 dense. "ours" is the node SpargeAttention, manual at topk or
auto budget; "drop" is upstream's rule in the same sampler: top-k in raster order, the rest is gone.
A row for each mode and density goes to benchmarks/results/quality.json. A --grid like 9 16 14 runs
on a CPU. With easycache there are also rows of ComfyUI's EasyCache alone, whose density is 1, and
of each mode with it. Their mode says how many steps of each clip it skipped.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from statistics import mean
from typing import Any

# ComfyUI's modules are not dependencies of the development environment.
# pyright: reportMissingImports=false
import torch
from torch import Tensor

import sparge
from benchmarks import companions
from benchmarks.comfyui_host import Host
from benchmarks.companions import ALONE
from benchmarks.quality.dit import DENSE_STEPS, STEPS, named, of_model
from benchmarks.quality.end_to_end import clip_psnr
from benchmarks.quality.modes import BY_NAME, where
from benchmarks.quality.rows import RESULTS, Row, write
from benchmarks.timing import commit
from benchmarks.tiny_video_dit import flow
from benchmarks.tiny_video_dit.checkpoint import SHIPPED, load_model
from benchmarks.tiny_video_dit.curriculum import FULL_GRID
from benchmarks.tiny_video_dit.latent import to_clips
from benchmarks.tiny_video_dit.sample import scenes_to_sample, starting_noise
from benchmarks.tiny_video_dit.scenes import context
from sparge.order.grid import TokenGrid
from sparge.policy import PV_FILTER_OFF
from sparge.session.timing import REFERENCE_VARIABLE

#: Widget `mode` of the node; drop is not a mode of the node.
NODE_MODES = {"drop": None, "ours manual": "manual", "ours auto": "auto budget"}
WITHOUT = "dense"
FEWEST_TOKENS = 100  # above the text's, below any grid's
Size = tuple[int, int, int]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, default=SHIPPED)
    parser.add_argument("--called", default="dit", help="what rows call the weights")
    parser.add_argument("--modes", nargs="+", choices=NODE_MODES, default=list(NODE_MODES))
    parser.add_argument("--densities", nargs="+", type=float, default=[0.1, 0.2, 0.3, 0.5])
    parser.add_argument(
        "--pvthreshd", type=float, default=PV_FILTER_OFF, help="of the node; 50 is off"
    )
    parser.add_argument("--with", choices=["easycache"], dest="companion")
    parser.add_argument("--reuse-threshold", type=float, default=0.2, help="of EasyCache")
    parser.add_argument("--clips", type=int, default=2)
    parser.add_argument("--grid", type=int, nargs=3, default=FULL_GRID, help="of tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the first clip")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="to write into the rows")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    os.environ[REFERENCE_VARIABLE] = "1"  # clips are judged, whatever is faster
    host = Host(os.environ["COMFYUI_DIR"])
    size = tuple(options.grid)
    seeds = range(options.seed, options.seed + options.clips)
    model = load(options.weights.resolve(), host.device)
    dense = [sample(model, size, seed) for seed in seeds]
    clips = named(TokenGrid(*size), f"comfyui clips {seeds[0]}-{seeds[-1]}")
    both = [companions.easycache(options.reuse_threshold)] if options.companion else []
    wanted = [(WITHOUT, 1.0, companion) for companion in both]
    for density in sorted(options.densities):
        wanted += [(mode, density, each) for mode in options.modes for each in (ALONE, *both)]
    for mode, density, companion in wanted:
        found, reached, skipped = [], [], []
        for seed, truth in zip(seeds, dense, strict=True):
            host.log.lines.clear()
            with_it = companion.apply(model)
            clip, kept = sparse_clip(host, with_it, mode, density, options, seed)
            found.append(clip_psnr(clip, truth))
            reached.append(kept)
            skipped.append(host.remarks().get("skipped_steps", 0))
        steps = f"{companion.name}, skipped {', '.join(map(str, skipped))} of {STEPS} steps"
        row: Row = {
            "data": of_model(clips, options.called),
            "mode": f"{mode} + {steps}" if companion.name else mode,
            "asked_density": density,
            "density": mean(reached),
            "psnr": mean(found),
            "worst_psnr": min(found),
            "where": where(BY_NAME.get(mode, BY_NAME["drop"]), host.device),
            "comfyui": host.version,
            "commit": options.commit or commit(),
        }
        write(options.out, [row])
        print(f"{row['mode']} at {row['density']:.3f}: {row['psnr']:.2f} dB", flush=True)


def load(weights: Path, device: torch.device) -> Any:
    """ComfyUI's model patcher of a weights' file."""
    import comfy.sd

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(weights)
    # The text's width is the one size that ComfyUI does not read off the weights.
    config = {"transformer": {"text_dim": model.config.text_width}}
    return comfy.sd.load_diffusion_model_state_dict(
        model.state_dict(), model_options={"dtype": dtype}, metadata={"config": json.dumps(config)}
    )


def sparse_clip(
    host: Host, model: Any, mode: str, density: float, options: argparse.Namespace, seed: int
) -> tuple[Tensor, float]:
    """The clip, and the density of its sparse calls."""
    size = tuple(options.grid)
    if mode == WITHOUT:
        return sample(model, size, seed), 1.0
    if NODE_MODES[mode] is None:
        drop = Drop(density, host.device)
        patched = model.clone()
        patched.model_options["transformer_options"]["optimized_attention_override"] = drop
        return sample(patched, size, seed), drop.stats.density
    patched = host.node.execute(
        model,
        mode=NODE_MODES[mode],
        topk=density,
        pvthreshd=options.pvthreshd,
        start_percent=DENSE_STEPS / STEPS,
        min_tokens=FEWEST_TOKENS,
    )[0]
    return sample(patched, size, seed), host.report()["density"]


def sample(model: Any, size: Size, seed: int) -> Tensor:
    """(frames, rows, columns, 3) in [0, 1], of the scene of `seed`."""
    import comfy.sample

    text = context(scenes_to_sample(1, size, seed))
    noise = starting_noise(1, size, seed)
    prompts = ([[text, {}]], [[torch.zeros_like(text), {}]])
    with torch.inference_mode():
        made = comfy.sample.sample(
            *(model, noise, STEPS, 1.0, "euler", "simple", *prompts, torch.zeros_like(noise)),
            seed=seed,
            disable_pbar=True,
        )
    return to_clips(model.get_model_object("latent_format").process_in(made))[0]


class Drop:
    """Override of ComfyUI's attention: upstream's rule in the sparse steps' self-attention."""

    def __init__(self, density: float, device: torch.device) -> None:
        self.policy = sparge.SparsePolicy(topk=density)
        self.stats = sparge.AttentionStats(device)
        self._first_sparse = float(flow.sampling_sigmas(STEPS)[DENSE_STEPS])

    def __call__(
        self, dense: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        sigma = float(kwargs["transformer_options"]["sigmas"][0])
        if q.shape[1] != k.shape[1] or sigma > self._first_sparse + 1e-4:
            return dense(q, k, v, heads, *args, **kwargs)
        q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
        out = sparge.attention(q, k, v, self.policy, layout="NHD", stats=self.stats)
        return out.flatten(2)


if __name__ == "__main__":
    main()
