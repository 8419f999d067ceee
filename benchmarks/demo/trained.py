# SPDX-License-Identifier: Apache-2.0
"""A clip of the small video DiT with dense and with sparse attention: a table, a picture, a GIF."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.demo.device import timed
from benchmarks.png import write_png
from benchmarks.quality.dit import DENSE_STEPS, STEPS, DenseRun, load_dit, sample_dense
from benchmarks.quality.end_to_end import Clips, clip_psnr, in_library
from benchmarks.quality.modes import BY_NAME
from benchmarks.tiny_video_dit.curriculum import FULL_GRID
from benchmarks.tiny_video_dit.gif import write_gif
from sparge.glyphs import write

GPU_SIZE = FULL_GRID
CPU_SIZE = (9, 16, 14)  # 2,016 tokens, which a CPU samples in seconds
DENSITIES = (0.5, 0.2)
SHOWN_DENSITY = 0.2
CALIBRATION_BLOCKS = 16
SHOWN_FRAMES = 3
ERROR_GAIN = 4
REPEATS = 3  # timed runs on a GPU; the median counts
PANEL = 320  # pixels a clip is at least scaled up to
MARGIN, CAPTION, LETTER_ZOOM = 8, 30, 2


@dataclass(frozen=True, eq=False)
class Row:
    name: str
    density: float
    seconds: float
    psnr: float
    clip: Tensor


def run(
    size: tuple[int, int, int], device: torch.device, weights: Path, seed: int, out: Path
) -> list[Row]:
    """The first row is the dense one; the pictures go into the folder `out`."""
    dense = sample_dense(load_dit(weights, device), size, seed)
    frames, rows, columns = dense.clip.shape[:3]
    print(
        f"Example: the small video DiT, {frames} frames of {columns} x {rows} pixels, "
        f"{dense.grid.tokens} tokens, {STEPS} steps"
    )
    _, milliseconds = timed(dense.finished, device, REPEATS)
    table = [Row("torch, dense", 1.0, milliseconds / 1000, float("inf"), dense.clip)]
    clips = Clips([dense], CALIBRATION_BLOCKS)
    table += [_sparse_row(dense, clips, density) for density in DENSITIES]
    print(_formatted(table))
    shown = [table[0], table[1 + DENSITIES.index(SHOWN_DENSITY)]]
    panels = _panels(*(row.clip.cpu() for row in shown))
    captions = [
        f"dense {shown[0].seconds:.2f} s",
        f"{shown[1].density:.0%} {shown[1].psnr:.1f} dB {shown[1].seconds:.2f} s",
        f"difference x {ERROR_GAIN}",
    ]
    picks = torch.linspace(0, frames - 1, SHOWN_FRAMES).round().long()
    sheet = torch.cat([_titles(captions, panels[0].shape[2]), *_side_by_side(panels)[picks]])
    write_png(out / "demo.png", (sheet * 255).round().to(torch.uint8))
    write_gif(out / "demo.gif", _side_by_side(panels))
    print(f"Pictures: {out / 'demo.png'} and {out / 'demo.gif'}: {', '.join(captions)}.")
    return table


def _sparse_row(dense: DenseRun, clips: Clips, density: float) -> Row:
    mode = BY_NAME["ours auto"]
    attention, reached = in_library(dense, mode, clips.budgets(0, mode, density))
    clip, milliseconds = timed(lambda: dense.finished(attention), dense.begun.device, REPEATS)
    name = f"sparge, auto {density:g}"
    return Row(name, reached(), milliseconds / 1000, clip_psnr(clip, dense.clip), clip)


def _formatted(table: list[Row]) -> str:
    lines = ["", "                     density      time s   PSNR dB"]
    lines += [
        f"{row.name:20} {row.density:7.1%} {row.seconds:11.2f} {row.psnr:9.1f}" for row in table
    ]
    return "\n".join(
        [
            *lines,
            f"Of the last {STEPS - DENSE_STEPS} steps; the first {DENSE_STEPS} are dense, and the "
            "heads are measured there. PSNR is against the dense clip.",
            "",
        ]
    )


def _panels(dense: Tensor, sparse: Tensor) -> list[Tensor]:
    """Clips (frames, rows, columns, 3), scaled up."""
    zoom = max(1, -(-PANEL // dense.shape[2]))
    difference = ((dense - sparse).abs() * ERROR_GAIN).clamp(max=1)
    return [
        clip.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
        for clip in (dense, sparse, difference)
    ]


def _side_by_side(panels: list[Tensor]) -> Tensor:
    """(frames, rows, columns, 3), white between the panels."""
    return torch.cat([pad(panel, (0, 0, 0, MARGIN, 0, MARGIN), value=1.0) for panel in panels], 2)


def _titles(captions: list[str], width: int) -> Tensor:
    """(CAPTION, columns, 3), each over its panel."""
    bands = []
    for caption in captions:
        band = torch.ones(CAPTION, width + MARGIN, 3)
        letters = write(caption, LETTER_ZOOM)[:, :width]
        top = (CAPTION - letters.shape[0]) // 2
        band[top : top + letters.shape[0], : letters.shape[1]][letters] = 0
        bands.append(band)
    return torch.cat(bands, 1)
