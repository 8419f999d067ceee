# SPDX-License-Identifier: Apache-2.0
"""Clips from the small video model by Euler steps, outside ComfyUI, and a look at them.

python -m benchmarks.tiny_video_dit.sample --weights FILE --out DIR [--steps 20] [--guidance 1]
    [--clips 4] [--seed N]

DIR gets samples.gif and samples.png: in each row what the text describes, and what the model made.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.png import write_png
from benchmarks.tiny_video_dit import flow
from benchmarks.tiny_video_dit.checkpoint import SHIPPED, load_model
from benchmarks.tiny_video_dit.clips import draw_clips
from benchmarks.tiny_video_dit.curriculum import FULL_GRID
from benchmarks.tiny_video_dit.gif import write_gif
from benchmarks.tiny_video_dit.latent import clip_size, to_clips
from benchmarks.tiny_video_dit.model import CHANNELS, PATCH, Attention, dense
from benchmarks.tiny_video_dit.scenes import Scenes, context, draw_scenes

SHOWN_FRAMES = 5  # of each clip in the picture
SCENE_SEED = 1_000_000  # away from the seeds of training


def scenes_to_sample(count: int, grid: tuple[int, int, int], seed: int) -> Scenes:
    """Scenes for clips of grid (in tokens), the same for a seed wherever they are sampled."""
    generator = torch.Generator().manual_seed(SCENE_SEED + seed)
    return draw_scenes(count, clip_size(grid), generator)


def starting_noise(clips: int, grid: tuple[int, int, int], seed: int) -> Tensor:
    """(clips, CHANNELS, frames, height, width) drawn on the CPU, as ComfyUI draws it."""
    frames, rows, columns = grid
    shape = (clips, CHANNELS, frames, rows * PATCH, columns * PATCH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sample(
    model: nn.Module,
    noise: Tensor,
    text: Tensor,
    steps: int = 20,
    guidance: float = 1.0,
    attention: Attention = dense,
) -> Tensor:
    """Latents of the model itself (see latent.py), float32, made from noise by Euler steps.

    Args:
        model: a VideoDiT, or what is called like one.
        noise: (B, CHANNELS, frames, height, width).
        text: (B, text tokens, text width).
        guidance: how far to go from the empty text's answer to the text's; 1 asks once a step.
        attention: what computes self-attention in every block.
    """
    return euler(model, noise, text, flow.sampling_sigmas(steps), guidance, attention)


@torch.inference_mode()
def euler(
    model: nn.Module,
    latent: Tensor,
    text: Tensor,
    sigmas: Tensor,
    guidance: float = 1.0,
    attention: Attention = dense,
) -> Tensor:
    """Runs `sample` from a latent at sigmas[0] to one at the last of `sigmas`."""
    weights = next(model.parameters())
    latent, text = latent.to(weights.device).float(), text.to(weights)
    empty = torch.zeros_like(text)

    def answer(sigma: Tensor, given: Tensor) -> Tensor:
        timestep = (sigma * flow.TIMESTEPS).to(latent.device).expand(len(latent))
        return model(latent.to(weights.dtype), timestep, given, attention).float()

    for sigma, following in pairwise(sigmas):
        direction = answer(sigma, text)
        if guidance != 1:
            direction = torch.lerp(answer(sigma, empty), direction, guidance)
        latent = latent + (following - sigma).item() * direction
    return latent


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--weights", type=Path, default=SHIPPED)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--clips", type=int, default=4)
    parser.add_argument("--grid", type=int, nargs=3, default=FULL_GRID, help="in tokens")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    grid = tuple(options.grid)
    scenes = scenes_to_sample(options.clips, grid, options.seed)
    described = draw_clips(scenes, clip_size(grid))
    model = load_model(options.weights, device)
    started = time.perf_counter()
    latent = sample(
        model,
        starting_noise(options.clips, grid, options.seed),
        context(scenes),
        options.steps,
        options.guidance,
    )
    made = to_clips(latent).cpu()
    print(f"{options.clips} clips in {time.perf_counter() - started:.2f} s on {device.type}")
    options.out.mkdir(parents=True, exist_ok=True)
    # (frames, clips x rows, described and made side by side, 3)
    pairs = torch.cat([described, made], 3).transpose(0, 1).flatten(1, 2)
    write_gif(options.out / "samples.gif", pairs)
    shown = pairs[torch.linspace(0, len(pairs) - 1, SHOWN_FRAMES).round().long()]
    sheet = torch.cat(list(shown), 1)
    write_png(options.out / "samples.png", (sheet * 255).round().to(torch.uint8))
    print(f"{options.out / 'samples.gif'}, {options.out / 'samples.png'}")


if __name__ == "__main__":
    main()
