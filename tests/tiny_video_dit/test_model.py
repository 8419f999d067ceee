# SPDX-License-Identifier: Apache-2.0
"""Sampling outside ComfyUI, and the clips that the network is trained on.

tests/quality samples with it, and tests/comfy compares its numbers and samples with ComfyUI's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.tiny_video_dit import flow
from benchmarks.tiny_video_dit import scenes as of_scenes
from benchmarks.tiny_video_dit.clips import draw_clips
from benchmarks.tiny_video_dit.latent import to_clips, to_latent
from benchmarks.tiny_video_dit.sample import sample, starting_noise
from benchmarks.tiny_video_dit.scenes import Scenes, context, draw_scenes

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


SIZE = (5, 36, 56)


def still(scenes: Scenes) -> Scenes:
    """Same objects, nothing moving."""
    motions = ("pan", "zoom", "turn", "velocity", "spin")
    return replace(scenes, **{name: torch.zeros_like(getattr(scenes, name)) for name in motions})


@pytest.fixture
def scenes(generator) -> Scenes:
    return draw_scenes(4, SIZE, generator)


def test_clips_are_pictures_and_nothing_moves_in_a_still_scene(scenes) -> None:
    clips = draw_clips(scenes, SIZE)
    assert clips.shape == (4, *SIZE, 3) and clips.min() >= 0 and clips.max() <= 1
    assert clips.std((1, 2, 3, 4)).min() > 0.02
    assert (clips.diff(dim=1).abs().amax((1, 2, 3, 4)) > 0.02).all()
    unmoved = draw_clips(still(scenes), SIZE)
    torch.testing.assert_close(unmoved[:, 0], unmoved[:, -1])
    assert context(scenes).shape == (4, of_scenes.TEXT_TOKENS, of_scenes.TEXT_WIDTH)


def test_the_camera_moves_the_ground(scenes) -> None:
    pan = torch.tensor([[2.0, -1.0]]).expand(4, 2) * of_scenes.TIME_UNIT  # pixels a frame
    bare = replace(still(scenes), pan=pan, present=torch.zeros(4, of_scenes.OBJECTS))
    clip = draw_clips(bare, SIZE)
    torch.testing.assert_close(clip[:, 3, :-3, 6:], clip[:, 0, 3:, :-6], rtol=1e-4, atol=1e-4)


def test_the_projection_never_changes() -> None:
    """Trained weights know this one."""
    signs = of_scenes._signs(4, torch.device("cpu"))[:, :8]
    rows = ["".join("+" if x > 0 else "-" for x in row) for row in signs]
    assert rows == ["+-+++++-", "--+--+--", "++---+--", "++-++---"]


def test_latents_keep_all_but_colour_inside_pairs(generator) -> None:
    pairs = torch.rand(2, 3, 8, 8, 3, generator=generator).repeat_interleave(2, 3)
    assert to_latent(pairs).shape == (2, 16, 3, 4, 4)
    torch.testing.assert_close(to_clips(to_latent(pairs)), pairs, rtol=0, atol=1e-5)
    deviation = to_latent(draw_clips(draw_scenes(48, SIZE, generator), SIZE)).std((0, 2, 3, 4))
    assert deviation.min() > 0.6 and deviation.max() < 1.4, "as large as the noise"
