# SPDX-License-Identifier: Apache-2.0
"""Small video DiT sampled with dense attention: its clip, and the calls that measuring sees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality.judge import Call
from benchmarks.quality_data.layer import Layer
from benchmarks.quality_data.weights import WeightsMissingError
from benchmarks.tiny_video_dit import flow
from benchmarks.tiny_video_dit.checkpoint import SHIPPED, load_model
from benchmarks.tiny_video_dit.curriculum import FULL_GRID
from benchmarks.tiny_video_dit.latent import to_clips
from benchmarks.tiny_video_dit.model import Attention, VideoDiT, dense
from benchmarks.tiny_video_dit.sample import euler, scenes_to_sample, starting_noise
from benchmarks.tiny_video_dit.scenes import context
from sparge.order.grid import TokenGrid

STEPS = 20
DENSE_STEPS = 4  # 20 %
TRAIN = "python -m benchmarks.tiny_video_dit.train --out DIR --seconds 900"


@dataclass(frozen=True, eq=False)
class DenseRun:
    """Dense run of one scene."""

    model: VideoDiT
    grid: TokenGrid
    seed: int
    text: Tensor
    begun: Tensor
    """The latent after the dense steps, from which sparse runs go on."""
    clip: Tensor
    """(frames, rows, columns, 3) in [0, 1]."""
    measured_calls: list[Call]
    """The calls of the last dense step, in which a session measures."""
    steps: int = STEPS

    @property
    def dense_steps(self) -> int:
        return dense_steps(self.steps)

    def finished(self, attention: Attention = dense) -> Tensor:
        """Clip (frames, rows, columns, 3) whose steps after the dense ones run with `attention`."""
        sigmas = flow.sampling_sigmas(self.steps)[self.dense_steps :]
        return to_clips(euler(self.model, self.begun, self.text, sigmas, attention=attention))[0]


def load_dit(weights: Path | None, device: torch.device, lora: Path | None = None) -> VideoDiT:
    """Loads the model, in bf16 on a GPU, in float32 elsewhere. lora: what is added to it.

    Raises:
        WeightsMissingError: the weights are not there; the message says what to do.
    """
    path = weights or SHIPPED
    if not path.is_file():
        raise WeightsMissingError(
            f"{path} is not there: the small video DiT is not trained yet. Train it on a GPU with "
            f"`{TRAIN}`, then copy DIR/{path.name} there or name it with --weights."
        )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return load_model(path, device, dtype, lora)


def dense_steps(steps: int) -> int:
    """Steps of a run that come before the sparse ones, one at least."""
    return max(1, steps * DENSE_STEPS // STEPS)


def sample_dense(
    model: VideoDiT, size: tuple[int, int, int], seed: int, steps: int = STEPS
) -> DenseRun:
    """Samples the scene of `seed`."""
    text = context(scenes_to_sample(1, size, seed))
    grid = TokenGrid(*size)
    latent = begun = starting_noise(1, size, seed)
    sigmas = flow.sampling_sigmas(steps)
    measured_calls: list[Call] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        layer = Layer(f"dit layer {block}", q.bfloat16(), k.bfloat16(), v.bfloat16(), grid)
        measured_calls.append(Call(layer, block))
        return dense(q, k, v, block)

    for step in range(steps):
        if step == dense_steps(steps):
            begun = latent
        attention = watched if step == dense_steps(steps) - 1 else dense
        latent = euler(model, latent, text, sigmas[step : step + 2], attention=attention)
    clip = to_clips(latent)[0]
    return DenseRun(model, grid, seed, text, begun, clip, measured_calls, steps)


def named(grid: TokenGrid, what: str) -> str:
    """Name of a data set; the model's own size goes without saying."""
    size = (grid.frames, grid.height, grid.width)
    return f"dit {what}" if size == FULL_GRID else f"dit {what} {'x'.join(map(str, size))}"


def of_model(data: str, called: str) -> str:
    """Name of a data set that other weights than the shipped ones made."""
    return called + data.removeprefix("dit")
