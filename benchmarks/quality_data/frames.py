# SPDX-License-Identifier: Apache-2.0
"""Frames of a video file, with whichever decoder is installed, and frames of another size."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

#: (frames, height, width, 3) uint8, red first.
Clip = NDArray[np.uint8]


class NoDecoderError(RuntimeError):
    """Error that no decoder is installed; the message is the sentence that a user reads."""


def read_video(path: Path, frames: int) -> Clip:
    """`frames` frames of a video file, evenly spaced from its first to its last.

    A .npz file, which needs no decoder, holds decoded ones as the Clip `frames`.

    Raises:
        NoDecoderError: none of the decoders in DECODERS is installed.
        ValueError: the file has fewer frames.
    """
    every = _decoded(path) if path.suffix == ".npz" else _decode(path)
    if len(every) < frames:
        raise ValueError(f"{path.name} has {len(every)} frames; {frames} are needed.")
    return np.stack([every[round(at)] for at in np.linspace(0, len(every) - 1, frames)])


def _decoded(path: Path) -> Sequence[Clip]:
    with np.load(path) as arrays:
        return arrays["frames"]


def _decode(path: Path) -> Sequence[Clip]:
    for module, decode in DECODERS.items():
        if importlib.util.find_spec(module):
            return list(decode(importlib.import_module(module), path))
    raise NoDecoderError(
        f"No decoder for {path.name}: none of {', '.join(DECODERS)} is installed; run "
        "`pip install av`, or leave out --video for a procedural clip."
    )


def resize(clip: Clip, size: tuple[int, int]) -> Tensor:
    """(frames, 3, *size) float32 in 0..255: the largest middle part of that shape, resampled."""
    pixels = torch.from_numpy(np.ascontiguousarray(clip)).permute(0, 3, 1, 2).float()
    scale = min(have / want for have, want in zip(pixels.shape[2:], size, strict=True))
    kept = [round(want * scale) for want in size]
    top, left = ((have - keep) // 2 for have, keep in zip(pixels.shape[2:], kept, strict=True))
    middle = pixels[:, :, top : top + kept[0], left : left + kept[1]]
    return interpolate(middle, size, mode="bilinear", antialias=True, align_corners=False)


def _with_av(av: Any, path: Path) -> Iterator[Clip]:
    with av.open(str(path)) as video:
        for frame in video.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


def _with_cv2(cv2: Any, path: Path) -> Iterator[Clip]:
    video = cv2.VideoCapture(str(path))
    while True:
        more, blue_first = video.read()
        if not more:
            return
        yield blue_first[:, :, ::-1]


def _with_imageio_ffmpeg(imageio_ffmpeg: Any, path: Path) -> Iterator[Clip]:
    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    for frame in reader:
        yield np.frombuffer(frame, np.uint8).reshape(height, width, 3)


DECODERS: dict[str, Callable[[Any, Path], Iterator[Clip]]] = {
    "av": _with_av,
    "cv2": _with_cv2,
    "imageio_ffmpeg": _with_imageio_ffmpeg,
}
