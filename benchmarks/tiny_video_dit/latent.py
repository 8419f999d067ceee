# SPDX-License-Identifier: Apache-2.0
"""Pictures as Wan's 16 latent channels, and back, without a VAE.

Each 2 x 4 block of pixels is one latent place: its eight brightnesses, and two colour differences
for each of its four pairs of neighbours in a row (4:2:2, what broadcast video keeps): 8 + 4 + 4
channels, none of them padding. Only colour detail inside a pair is lost.

These are the latents inside the model. ComfyUI adds and takes away the mean and deviation of Wan's
VAE around it: what its sampler returns is read by `latent_format.process_in` first.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

ROWS, COLUMNS = 2, 4  # pixels a latent place
#: Middle and factor of brightness and colour differences, which make their deviation about 1, as
#: the flow's noise has (docs/experiments.md, Gain of the latent).
GREY, GAIN = 0.49, 6.0

#: Y, Cb, Cr of red, green, blue (ITU-R BT.601, full range).
_TO_YCC = (
    (0.299, 0.587, 0.114),
    (-0.168736, -0.331264, 0.5),
    (0.5, -0.418688, -0.081312),
)


def to_latent(clips: Tensor) -> Tensor:
    """(B, 16, frames, rows / 2, columns / 4) of clips (B, frames, rows, columns, 3) in [0, 1]."""
    batch, frames, rows, columns, _ = clips.shape
    if rows % ROWS or columns % COLUMNS:
        raise ValueError(
            f"the clip is {rows} x {columns} pixels; it must divide into {ROWS} x {COLUMNS} blocks"
        )
    ycc = clips @ _matrix(clips.device).T
    blocks = ycc.view(batch, frames, rows // ROWS, ROWS, columns // COLUMNS, COLUMNS, 3)
    luma = (blocks[..., 0] - GREY) * GAIN
    pairs = blocks[..., 1:].unflatten(5, (-1, 2)).mean(6) * GAIN
    channels = (
        luma.permute(0, 3, 5, 1, 2, 4).flatten(1, 2),
        pairs.permute(0, 6, 3, 5, 1, 2, 4).flatten(1, 3),
    )
    return torch.cat(channels, 1)


def to_clips(latent: Tensor) -> Tensor:
    """Clips (B, frames, rows, columns, 3) in [0, 1], clamped, of the model's own latents."""
    luma, chroma = latent.float().split((ROWS * COLUMNS, ROWS * COLUMNS), 1)
    luma = luma.unflatten(1, (ROWS, COLUMNS)) / GAIN + GREY
    pairs = chroma.unflatten(1, (2, ROWS, COLUMNS // 2)) / GAIN
    chroma = pairs.repeat_interleave(2, 3)
    ycc = torch.cat([luma.unsqueeze(1), chroma], 1)  # B, 3, ROWS, COLUMNS, frames, rows, columns
    places = ycc.permute(0, 4, 5, 2, 6, 3, 1).flatten(4, 5).flatten(2, 3)
    return (places @ _matrix(latent.device).inverse().T).clamp(0, 1)


def clip_size(grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """(frames, rows, columns) in pixels of a grid of tokens, each 2 x 2 latent places."""
    frames, rows, columns = grid
    return frames, rows * 2 * ROWS, columns * 2 * COLUMNS


@cache  # a copy to the GPU would wait for it
def _matrix(device: torch.device) -> Tensor:
    return torch.tensor(_TO_YCC, device=device)
