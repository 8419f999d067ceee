# SPDX-License-Identifier: Apache-2.0
"""Sampling outside ComfyUI. Equality with ComfyUI's sampler is in tests/comfy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.tiny_video_dit import flow
from benchmarks.tiny_video_dit.sample import sample, starting_noise

GRID = (2, 3, 4)


class Oracle(nn.Module):
    """Answers the flow from `noise` to the clip that the text gives."""

    def __init__(self, noise: torch.Tensor) -> None:
        super().__init__()
        self.noise = nn.Parameter(noise)
        self.timesteps: list[float] = []

    def forward(self, latent, timestep, context, attention):
        self.timesteps.append(float(timestep[0]))
        return self.noise - context[:, :1, :1, None, None]


@pytest.mark.parametrize("steps", [1, 7])
def test_a_true_flow_ends_at_the_clip(steps) -> None:
    noise = starting_noise(2, GRID, seed=3)
    oracle, text = Oracle(noise), torch.tensor([0.5, -2.0]).view(2, 1, 1)
    made = sample(oracle, noise, text, steps)
    expected = text[..., None, None].expand_as(noise)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)
    assert oracle.timesteps[0] == 1000 and len(oracle.timesteps) == steps


def test_training_covers_all_noise_levels(generator) -> None:
    sigmas = flow.training_sigmas(8, generator)
    bounds = flow.shifted(torch.arange(9) / 8, flow.TRAINING_SHIFT)
    assert ((sigmas >= bounds[:-1]) & (sigmas <= bounds[1:])).all()
