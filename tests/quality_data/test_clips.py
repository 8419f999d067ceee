# SPDX-License-Identifier: Apache-2.0
"""Clips are repeatable and move; frames of files come evenly spaced and at the asked size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quality_data.clips import make_clip
from benchmarks.quality_data.frames import read_video, resize


def test_clips_are_repeatable_move_and_have_the_same_content_at_every_size(seed: int) -> None:
    clip = make_clip(6, 32, 48, seed=seed)
    assert clip.shape == (6, 32, 48, 3) and clip.dtype == np.uint8
    assert np.array_equal(clip, make_clip(6, 32, 48, seed=seed))
    assert not np.array_equal(clip, make_clip(6, 32, 48, seed=seed + 1))
    step = np.abs(np.diff(clip.astype(float), axis=0)).mean((1, 2, 3))
    assert step.min() > 0 and step.mean() < np.abs(clip[-1].astype(float) - clip[0]).mean()
    large = resize(make_clip(6, 128, 192, seed=seed), (32, 48))
    small = resize(clip, (32, 48))
    assert float((small - large).abs().mean()) < 0.3 * float((large - large.mean()).abs().mean())
    with pytest.raises(ValueError, match="0 x 8 x 8 is empty"):
        make_clip(0, 8, 8)


def test_frames_are_evenly_spaced_and_their_middle_is_taken(tmp_path: Path) -> None:
    every = np.arange(49, dtype=np.uint8)[:, None, None, None].repeat(3, 3)
    np.savez_compressed(tmp_path / "x.npz", frames=every)
    taken = read_video(tmp_path / "x.npz", 12)[:, 0, 0, 0].tolist()
    assert taken == [0, 4, 9, 13, 17, 22, 26, 31, 35, 39, 44, 48]
    with pytest.raises(ValueError, match="49 frames; 50 are needed"):
        read_video(tmp_path / "x.npz", 50)
    clip = np.zeros((1, 20, 60, 3), np.uint8)
    clip[:, :, 20:40] = 255
    torch.testing.assert_close(resize(clip, (10, 10)), torch.full((1, 3, 10, 10), 255.0))
