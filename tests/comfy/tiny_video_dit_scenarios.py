# SPDX-License-Identifier: Apache-2.0
"""The small video model in ComfyUI's loader and sampler, and our own. Runs in ComfyUI's process."""

from __future__ import annotations

from pathlib import Path

import comfy.sample
import comfy.sd
import torch

from benchmarks.tiny_video_dit import checkpoint, flow
from benchmarks.tiny_video_dit.model import CHANNELS, Config, initialised
from benchmarks.tiny_video_dit.sample import sample, starting_noise
from benchmarks.tiny_video_dit.scenes import TEXT_TOKENS, TEXT_WIDTH

GRID = (3, 7, 5)
STEPS = 6


def write_weights(folder: Path) -> Path:
    """The default size, every weight random, so that a part that is off shows."""
    generator = torch.Generator().manual_seed(11)
    model = initialised(Config(), 11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "modulation" in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
            elif name.startswith(("time_projection", "head.head")):
                parameter.normal_(0, 0.03, generator=generator)
    return checkpoint.save(folder, model.state_dict(), model.config)


def text(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, TEXT_TOKENS, TEXT_WIDTH, generator=generator)


def difference(got: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    assert got.shape == expected.shape
    return {
        "difference": float((got - expected).abs().max()),
        "magnitude": float(expected.abs().max()),
    }


@torch.inference_mode()
def compare(folder: str) -> dict[str, object]:
    path = write_weights(Path(folder))
    theirs = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})
    ours = checkpoint.load_model(path, dtype=torch.float32)
    network = theirs.model.diffusion_model
    noise = starting_noise(2, GRID, seed=12)
    timestep = torch.tensor([937.5, 41.25])
    forward = difference(ours(noise, timestep, text(13)), network(noise, timestep, text(13)))

    generator = torch.Generator().manual_seed(14)
    clean = torch.randn(1, CHANNELS, *noise.shape[2:], generator=generator)
    prompt = text(15)[:1]
    made = comfy.sample.sample(
        theirs,
        noise[:1],
        STEPS,
        1.0,
        "euler",
        "simple",
        [[prompt, {}]],
        [[torch.zeros_like(prompt), {}]],
        torch.zeros_like(clean),
        seed=0,
        disable_pbar=True,
    )
    latent_format = theirs.get_model_object("latent_format")
    expected = latent_format.process_in(made)
    sampling = theirs.get_model_object("model_sampling")
    schedule = comfy.samplers.calculate_sigmas(sampling, "simple", STEPS)
    return {
        "model": type(theirs.model).__name__,
        "missing": sorted(set(network.state_dict()) ^ set(ours.state_dict())),
        "blocks": len(network.blocks),
        "heads": network.num_heads,
        "text_width": network.text_dim,
        "forward": forward,
        "sampled": difference(sample(ours, noise[:1], prompt, STEPS), expected),
        "schedule": difference(flow.sampling_sigmas(STEPS), schedule),
    }
