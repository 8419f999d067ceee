# SPDX-License-Identifier: Apache-2.0
"""Sampling outside ComfyUI.

tests/quality samples with it, and tests/comfy compares its numbers and samples with ComfyUI's.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.tiny_video_dit import flow
from benchmarks.tiny_video_dit import scenes as of_scenes
from benchmarks.tiny_video_dit.latent import to_clips, to_latent
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


def test_noise_levels_are_shifted_as_comfyui_shifts_them() -> None:
    """Even levels 1, 3/4, 1/2, 1/4 by 8 x / (1 + 7 x); those of training by 5 x / (1 + 4 x)."""
    levels = torch.tensor([1, 24 / 25, 8 / 9, 8 / 11, 0])
    torch.testing.assert_close(flow.sampling_sigmas(4), levels)
    assert flow.shifted(torch.tensor(0.5), flow.TRAINING_SHIFT) == pytest.approx(5 / 6)


@pytest.mark.parametrize("steps", [1, 7])
def test_a_true_flow_ends_at_the_clip(steps) -> None:
    noise = starting_noise(2, GRID, seed=3)
    oracle, text = Oracle(noise), torch.tensor([0.5, -2.0]).view(2, 1, 1)
    made = sample(oracle, noise, text, steps)
    expected = text[..., None, None].expand_as(noise)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)
    assert oracle.timesteps[0] == 1000 and len(oracle.timesteps) == steps


def test_the_projection_never_changes() -> None:
    """Trained weights know this one."""
    signs = of_scenes._signs(4, torch.device("cpu"))[:, :8]
    rows = ["".join("+" if x > 0 else "-" for x in row) for row in signs]
    assert rows == ["+-+++++-", "--+--+--", "++---+--", "++-++---"]


def test_latents_keep_all_but_colour_inside_pairs(generator) -> None:
    pairs = torch.rand(2, 3, 8, 8, 3, generator=generator).repeat_interleave(2, 3)
    assert to_latent(pairs).shape == (2, 16, 3, 4, 4)
    torch.testing.assert_close(to_clips(to_latent(pairs)), pairs, rtol=0, atol=1e-5)
