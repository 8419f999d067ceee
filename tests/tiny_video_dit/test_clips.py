# SPDX-License-Identifier: Apache-2.0
"""Scenes, their pictures, their text, and pictures as latents."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.tiny_video_dit.clips import draw_clips
from benchmarks.tiny_video_dit.latent import to_clips, to_latent
from benchmarks.tiny_video_dit.scenes import (
    OBJECTS,
    TEXT_TOKENS,
    TEXT_WIDTH,
    TIME_UNIT,
    Scenes,
    _signs,
    context,
    draw_scenes,
)

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
    assert context(scenes).shape == (4, TEXT_TOKENS, TEXT_WIDTH)


def test_the_camera_moves_the_ground(scenes) -> None:
    pan = torch.tensor([[2.0, -1.0]]).expand(4, 2) * TIME_UNIT  # pixels a frame
    bare = replace(still(scenes), pan=pan, present=torch.zeros(4, OBJECTS))
    clip = draw_clips(bare, SIZE)
    torch.testing.assert_close(clip[:, 3, :-3, 6:], clip[:, 0, 3:, :-6], rtol=1e-4, atol=1e-4)


def test_the_projection_never_changes() -> None:
    """Trained weights know this one."""
    signs = ["".join("+" if x > 0 else "-" for x in row) for row in _signs(4, torch.device("cpu"))]
    assert [row[:8] for row in signs] == ["+-+++++-", "--+--+--", "++---+--", "++-++---"]


def test_latents_keep_all_but_colour_inside_pairs(generator) -> None:
    pairs = torch.rand(2, 3, 8, 8, 3, generator=generator).repeat_interleave(2, 3)
    assert to_latent(pairs).shape == (2, 16, 3, 4, 4)
    torch.testing.assert_close(to_clips(to_latent(pairs)), pairs, rtol=0, atol=1e-5)
    deviation = to_latent(draw_clips(draw_scenes(48, SIZE, generator), SIZE)).std((0, 2, 3, 4))
    assert deviation.min() > 0.6 and deviation.max() < 1.4, "as large as the noise"
