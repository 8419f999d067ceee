# SPDX-License-Identifier: Apache-2.0
"""Frames of a video file, and frames of another size."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

#: (frames, height, width, 3) uint8, red first.
Clip = NDArray[np.uint8]


def read_video(path: Path, frames: int) -> Clip:
    """`frames` frames of a video file, evenly spaced from its first to its last.

    A .npz file, which needs no decoder, holds decoded ones as the Clip `frames`.

    Raises:
        ValueError: the file has fewer frames.
        ModuleNotFoundError: a video, and PyAV is not installed (`pip install av`).
    """
    every = np.load(path)["frames"] if path.suffix == ".npz" else _decode(path)
    if len(every) < frames:
        raise ValueError(f"{path.name} has {len(every)} frames; {frames} are needed.")
    return np.stack([every[round(at)] for at in np.linspace(0, len(every) - 1, frames)])


def _decode(path: Path) -> Sequence[Clip]:
    av = importlib.import_module("av")
    with av.open(str(path)) as video:
        return [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]


def resize(clip: Clip, size: tuple[int, int]) -> Tensor:
    """(frames, 3, *size) float32 in 0..255: the largest middle part of that shape, resampled."""
    pixels = torch.from_numpy(np.ascontiguousarray(clip)).permute(0, 3, 1, 2).float()
    scale = min(have / want for have, want in zip(pixels.shape[2:], size, strict=True))
    kept = [round(want * scale) for want in size]
    top, left = ((have - keep) // 2 for have, keep in zip(pixels.shape[2:], kept, strict=True))
    middle = pixels[:, :, top : top + kept[0], left : left + kept[1]]
    return interpolate(middle, size, mode="bilinear", antialias=True, align_corners=False)
