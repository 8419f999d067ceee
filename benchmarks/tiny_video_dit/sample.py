# SPDX-License-Identifier: Apache-2.0
"""Clips from the small video model by Euler steps, outside ComfyUI."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.tiny_video_dit import flow
from benchmarks.tiny_video_dit.latent import clip_size
from benchmarks.tiny_video_dit.model import CHANNELS, PATCH, Attention, dense
from benchmarks.tiny_video_dit.scenes import Scenes, draw_scenes

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
    attention: Attention = dense,
) -> Tensor:
    """Latents of the model itself (see latent.py), float32, made from noise by Euler steps.

    Args:
        model: a VideoDiT, or what is called like one.
        noise: (B, CHANNELS, frames, height, width).
        text: (B, text tokens, text width).
        attention: what computes self-attention in every block.
    """
    return euler(model, noise, text, flow.sampling_sigmas(steps), attention)


@torch.inference_mode()
def euler(
    model: nn.Module,
    latent: Tensor,
    text: Tensor,
    sigmas: Tensor,
    attention: Attention = dense,
) -> Tensor:
    """Runs `sample` from a latent at sigmas[0] to one at the last of `sigmas`."""
    weights = next(model.parameters())
    latent, text = latent.to(weights.device).float(), text.to(weights)
    for sigma, following in pairwise(sigmas):
        timestep = (sigma * flow.TIMESTEPS).to(latent.device).expand(len(latent))
        answer = model(latent.to(weights.dtype), timestep, text, attention).float()
        latent = latent + (following - sigma).item() * answer
    return latent
