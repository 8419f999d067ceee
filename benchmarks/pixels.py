# SPDX-License-Identifier: Apache-2.0
"""Tensors of pixels as Pillow's images, and clips as animated GIFs."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor


def to_image(pixels: Tensor) -> Image.Image:
    """Image of pixels (height, width, 3) in [0, 1]."""
    return Image.fromarray((pixels.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy())


def write_gif(path: Path, frames: Tensor, frames_per_second: int = 12) -> None:
    """Writes frames (count, height, width, 3) in [0, 1], repeating for ever."""
    first, *others = (to_image(frame).quantize(dither=Image.Dither.NONE) for frame in frames)
    duration = round(1000 / frames_per_second)
    first.save(path, save_all=True, append_images=others, duration=duration, loop=0)
