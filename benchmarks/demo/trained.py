# SPDX-License-Identifier: Apache-2.0
"""A clip of the small video DiT with dense and with sparse attention: a table, a picture, a GIF."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.demo.device import timed
from benchmarks.pixels import to_image, write_gif
from benchmarks.quality.dit import DENSE_STEPS, STEPS, DenseRun
from benchmarks.quality.end_to_end import Clips, clip_psnr, in_library
from benchmarks.quality.modes import BY_NAME
from benchmarks.tiny_video_dit.curriculum import FULL_GRID
from sparge.session import Aim

GPU_SIZE = FULL_GRID
CPU_SIZE = (9, 16, 14)  # 2,016 tokens: not two minutes of one core, most of it our reference
#: Modes and densities that are compared; the last one's difference from dense is shown.
COMPARED = (("ours auto", 0.5), ("drop", 0.2), ("ours auto", 0.2))
TITLES = {"ours auto": "sparge, auto", "drop": "plain drop"}
SHOWN_FRAMES = 3
ERROR_GAIN = 4
REPEATS = 3  # timed runs on a GPU; the median counts
PANEL = 320  # pixels a clip is at least scaled up to
MARGIN = 8
LETTERS, LINE = 18, 24  # pixels of a letter and of a line of a caption
ABOUT = f"""\
Of the last {STEPS - DENSE_STEPS} steps; the first {DENSE_STEPS} are dense, and the heads are
measured in the last of them. PSNR is against the dense clip.
Plain drop is SpargeAttn's rule: a top-k of block means, and the rest is gone.
Small clips have few blocks to choose from: they lose more than large ones."""


@dataclass(frozen=True, eq=False)
class Row:
    name: str
    density: float
    seconds: float
    psnr: float
    clip: Tensor


def run(dense: DenseRun, out: Path) -> list[Row]:
    """Makes the rows, the dense one first; the pictures go into the folder `out`."""
    device = dense.begun.device
    frames, rows, columns = dense.clip.shape[:3]
    print(
        f"Example: the small video DiT, {frames} frames of {columns} x {rows} pixels, "
        f"{dense.grid.tokens} tokens, {STEPS} steps"
    )
    _, milliseconds = timed(dense.finished, device, REPEATS)
    table = [Row("torch, dense", 1.0, milliseconds / 1000, float("inf"), dense.clip)]
    clips = Clips([dense])
    table += [sparse_row(dense, clips, mode, density) for mode, density in COMPARED]
    print(_formatted(table))
    panels = _panels([row.clip.cpu() for row in table])
    captions = [
        ("dense attention", _caption(table[0], device)),
        *((f"{row.name}: {row.psnr:.1f} dB", _caption(row, device)) for row in table[1:]),
        (f"difference x {ERROR_GAIN}", f"of {table[-1].name}"),
    ]
    side_by_side, titles = _side_by_side(panels), _titles(captions, panels[0].shape[2])
    picks = torch.linspace(0, frames - 1, SHOWN_FRAMES).round().long()
    sheet = torch.cat([titles, *side_by_side[picks]])
    to_image(sheet).save(out / "demo.png")
    titled = torch.cat([titles.expand(frames, -1, -1, -1), side_by_side], 1)
    write_gif(out / "demo.gif", titled)
    print(
        f"Pictures: {out / 'demo.png'} (first, middle and last frame) and {out / 'demo.gif'}: "
        f"dense, sparse, and what {table[-1].name} changes x {ERROR_GAIN}.\n"
    )
    return table


def _caption(row: Row, device: torch.device) -> str:
    """Caption of a row. On a CPU no seconds: those of the reference would read as a speed."""
    took = f", {row.seconds:.2f} s" if device.type == "cuda" else ""
    return f"{row.density:.0%} of pairs{took}"


def sparse_row(dense: DenseRun, clips: Clips, mode_name: str, density: float) -> Row:
    mode = BY_NAME[mode_name]
    attention, reached = in_library(dense, mode, clips.budgets_for(0, mode, Aim("budget", density)))
    clip, milliseconds = timed(lambda: dense.finished(attention), dense.begun.device, REPEATS)
    name = f"{TITLES[mode_name]} {density:g}"
    return Row(name, reached(), milliseconds / 1000, clip_psnr(clip, dense.clip), clip)


def _formatted(table: list[Row]) -> str:
    lines = [
        f"{row.name:20} {row.density:7.1%} {row.seconds:11.2f} {row.psnr:9.1f}" for row in table
    ]
    return "\n".join(["", "                     density      time s   PSNR dB", *lines, ABOUT, ""])


def _panels(clips: list[Tensor]) -> list[Tensor]:
    """Clips (frames, rows, columns, 3) scaled up, dense first, then what the last one changes."""
    dense, last = clips[0], clips[-1]
    zoom = max(1, -(-PANEL // dense.shape[2]))
    difference = ((dense - last).abs() * ERROR_GAIN).clamp(max=1)
    return [
        clip.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2) for clip in (*clips, difference)
    ]


def _side_by_side(panels: list[Tensor]) -> Tensor:
    """(frames, rows, columns, 3), white between the panels."""
    return torch.cat([pad(panel, (0, 0, 0, MARGIN, 0, MARGIN), value=1.0) for panel in panels], 2)


def _titles(captions: list[tuple[str, ...]], width: int) -> Tensor:
    """(lines, columns, 3), each caption over its panel, cut where the panel ends."""
    bands = []
    for caption in captions:
        band = Image.new("RGB", (width + MARGIN, LINE * len(caption) + MARGIN), "white")
        text = "\n".join(caption)
        ImageDraw.Draw(band).multiline_text((0, 0), text, "black", ImageFont.load_default(LETTERS))
        bands.append(torch.from_numpy(np.array(band)) / 255)
    return torch.cat(bands, 1)
