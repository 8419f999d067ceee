# SPDX-License-Identifier: Apache-2.0
"""Trains the small video model on one GPU.

python -m benchmarks.tiny_video_dit.train --out DIR --seconds 900 [--seed N] [--commit HASH]
    [--width 384 --blocks 6]

Learning rate and clip sizes follow the share of --seconds that is over. DIR gets the weights (see
checkpoint.py).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from benchmarks.tiny_video_dit import checkpoint, flow
from benchmarks.tiny_video_dit.clips import draw_clips
from benchmarks.tiny_video_dit.curriculum import FULL, PHASES, Batch, Phase, batch_at, rate_at
from benchmarks.tiny_video_dit.latent import clip_size, to_latent
from benchmarks.tiny_video_dit.model import (
    HEAD_DIM,
    Attention,
    Config,
    VideoDiT,
    dense,
    initialised,
)
from benchmarks.tiny_video_dit.optimizer import WORKING_TYPE, Optimizer
from benchmarks.tiny_video_dit.scenes import context, draw_scenes

WITHOUT_TEXT = 0.1  # share of clips, so that a sampler may guide away from the empty text
LOG_EVERY = 50
VALIDATION_SEED = 2**62  # of scenes that training never draws
VALIDATION_CLIPS = 16


@dataclass(frozen=True, eq=False)
class Example:
    """Input that the model is given, and the flow it should answer."""

    latent: Tensor
    timestep: Tensor
    context: Tensor
    flow: Tensor


def draw_example(batch: Batch, seed: int, device: torch.device) -> Example:
    """Clips, noise and noise levels, all from `seed`."""
    generator = torch.Generator(device).manual_seed(seed)
    return draw_noisy(batch, generator, flow.training_sigmas(batch.clips, generator))


def draw_noisy(batch: Batch, generator: torch.Generator, sigmas: Tensor) -> Example:
    """Clips and noise at these noise levels, one of each clip."""
    device, size = generator.device, clip_size(batch.grid)
    scenes = draw_scenes(batch.clips, size, generator)
    clean = to_latent(draw_clips(scenes, size))
    noise = torch.randn(clean.shape, generator=generator, device=device)
    told = torch.rand(batch.clips, 1, 1, generator=generator, device=device) >= WITHOUT_TEXT
    return Example(
        latent=flow.noisy(clean, noise, sigmas).to(WORKING_TYPE),
        timestep=sigmas * flow.TIMESTEPS,
        context=(context(scenes) * told).to(WORKING_TYPE),
        flow=noise - clean,
    )


Draw = Callable[[Batch, int, torch.device], Example]


def loss_of(model: VideoDiT, example: Example, attention: Attention) -> Tensor:
    answer = model(example.latent, example.timestep, example.context, attention)
    return mse_loss(answer.float(), example.flow)


class Trainer:
    """A model in training; every step depends on the seed, the step's number and progress only."""

    def __init__(
        self,
        model: VideoDiT,
        seed: int,
        device: torch.device,
        phases: tuple[Phase, ...] = PHASES,
        attention: Attention = dense,
        draw: Draw = draw_example,
        rate: float = 1.0,
    ) -> None:
        """draw: makes the examples. rate: share of the curriculum's learning rates."""
        self.model, self.seed, self.device = model, seed, device
        self.phases, self.attention, self.draw, self.rate = phases, attention, draw, rate
        self.optimizer = Optimizer(self.model, device)

    def step(self, progress: float) -> tuple[Batch, Tensor, Tensor]:
        """One update; returns its batch, loss and gradient norm, the last two on the device."""
        number = self.optimizer.step
        batch = batch_at(number, progress, self.phases)
        example = self.draw(batch, (self.seed << 32) + number, self.device)
        loss = loss_of(self.model, example, self.attention)
        loss.backward()
        return batch, loss.detach(), self.optimizer.update(self.rate * rate_at(progress))

    @torch.no_grad()
    def validation_loss(self, batch: Batch, clips: int = VALIDATION_CLIPS) -> float:
        """Loss of the averaged weights, on scenes of the batch's size that training does not
        see."""
        self.optimizer.show(self.optimizer.average.values())
        seeds = range(VALIDATION_SEED, VALIDATION_SEED + math.ceil(clips / batch.clips))
        examples = (self.draw(batch, seed, self.device) for seed in seeds)
        losses = [loss_of(self.model, example, self.attention) for example in examples]
        self.optimizer.show(self.optimizer.weights)
        return float(torch.stack(losses).mean())


def train_for(trainer: Trainer, seconds: float) -> None:
    """Makes steps until this many seconds have passed, and prints a JSON object every LOG_EVERY
    steps. Raises FloatingPointError if the loss does."""
    started = logged = time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds:
        progress = elapsed / seconds
        batch, loss, norm = trainer.step(progress)
        step = trainer.optimizer.step
        if step % LOG_EVERY == 0:
            value = loss.item()  # waits for the GPU
            now = time.monotonic()
            line = {
                "step": step,
                "seconds": round(now - started, 1),
                "grid": "x".join(map(str, batch.grid)),
                "loss": round(value, 5),
                "gradient": round(norm.item(), 4),
                "ms_per_step": round(1e3 * (now - logged) / LOG_EVERY, 2),
            }
            print(json.dumps(line), flush=True)
            logged = now
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the loss is {value} at step {step}: lower PEAK_RATE in curriculum.py, or "
                    "take another --seed"
                )


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    """Attention by cuDNN where it has a plan for the shape: on Hopper it is well ahead, yet some
    versions of torch try it last."""
    if _cudnn_serves(*q.shape[:3]):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v)
    return dense(q, k, v, block)


@cache
def _cudnn_serves(clips: int, heads: int, tokens: int) -> bool:
    """Whether cuDNN computes a call and its gradients, all finite."""
    made = torch.randn(3, clips, tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in made)
        try:
            out = scaled_dot_product_attention(q, k, v)
            parts = (out, *torch.autograd.grad(out, (q, k, v), out))
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            return False
    return all(bool(torch.isfinite(part).all()) for part in parts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--seconds", type=float, required=True, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="", help="noted in the weights' header")
    parser.add_argument("--width", type=int, help="a multiple of 128")
    parser.add_argument("--blocks", type=int)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    sizes = {"width": options.width, "blocks": options.blocks}
    config = replace(Config(), **{name: size for name, size in sizes.items() if size is not None})
    attention = cudnn_attention if device.type == "cuda" else dense
    model = initialised(config, options.seed)
    trainer = Trainer(model, options.seed, device, attention=attention)
    train_for(trainer, options.seconds)
    loss = round(trainer.validation_loss(FULL), 5)
    print(json.dumps({"step": trainer.optimizer.step, "validation_loss": loss}))
    optimizer, said = trainer.optimizer, {"seed": options.seed, "commit": options.commit}
    said |= {"step": optimizer.step, "seconds": options.seconds, "loss": loss}
    checkpoint.save(options.out, optimizer.average, config, **said)


if __name__ == "__main__":
    main()
