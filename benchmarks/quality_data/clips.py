# SPDX-License-Identifier: Apache-2.0
"""Video clips made from a seed, at any size: the scenes that the small video DiT learns from."""

from __future__ import annotations

import torch

from benchmarks.quality_data.frames import Clip
from benchmarks.tiny_video_dit.clips import draw_clips
from benchmarks.tiny_video_dit.scenes import FULL_ROWS, draw_scenes


def make_clip(frames: int, height: int, width: int, seed: int = 0) -> Clip:
    """(frames, height, width, 3) uint8, the same for the same arguments; the picture's height is
    always that of the DiT's largest clips, so the size is one of detail.

    Raises:
        ValueError: an extent below 1.
    """
    if min(frames, height, width) < 1:
        raise ValueError(f"A clip of {frames} x {height} x {width} is empty; extents start at 1.")
    magnified = height / FULL_ROWS
    shown = (frames, FULL_ROWS, round(width / magnified))
    scenes = draw_scenes(1, shown, torch.Generator().manual_seed(seed))
    clip = draw_clips(scenes, (frames, height, width), magnified)[0]
    return (clip * 255).round().to(torch.uint8).numpy()
