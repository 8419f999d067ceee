# SPDX-License-Identifier: Apache-2.0
"""Moving picture for the README: a clip of the small video DiT, dense and sparse side by side.

python -m benchmarks.demo.moving [--out FILE] [--seed N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from benchmarks.demo import trained
from benchmarks.demo.device import choose_device
from benchmarks.pixels import to_image
from benchmarks.quality.dit import DENSE_STEPS, STEPS, DenseRun, load_dit, sample_dense
from benchmarks.quality.end_to_end import Clips

CPU_SIZE = (17, 28, 24)  # 11,424 tokens: about half an hour of one core
DENSITY = 0.2
SEED = 10
PANEL, GAP = 440, 16  # pixels: width of a clip, and what is around it
HEAD, FOOT = 80, 50  # pixels of the captions above and of the line below
PAPER, INK, FAINT = (24, 25, 30), (240, 241, 244), (164, 168, 180)
TITLE, LINE = 28, 20  # pixels of letters
FRAMES_PER_SECOND = 10
QUALITY = 80


def run(dense: DenseRun, path: Path) -> trained.Row:
    """Writes the picture of a dense clip and of the same one sparse, whose row it returns."""
    row = trained.sparse_row(dense, Clips([dense]), "ours auto", DENSITY)
    captions = (
        ("Every key", "dense attention"),
        (
            f"{row.density:.0%} of the keys".replace("%", " %"),
            f"sparse attention, {row.psnr:.1f} dB PSNR",
        ),
    )
    sheet = _sheet(captions, dense)
    frames = []
    for pair in zip(dense.clip.cpu(), row.clip.cpu(), strict=True):
        frame = sheet.copy()
        for place, pixels in enumerate(pair):
            image = to_image(pixels).resize(_panel(dense), Image.Resampling.BICUBIC)
            frame.paste(image, (_left(place), HEAD))
        frames.append(frame)
    first, *others = frames + frames[-2:0:-1]  # forth and back, without a jump
    path.parent.mkdir(parents=True, exist_ok=True)
    duration = round(1000 / FRAMES_PER_SECOND)
    moving = {"save_all": True, "append_images": others, "duration": duration, "loop": 0}
    first.save(path, **moving, quality=QUALITY, method=6)
    return row


def _panel(dense: DenseRun) -> tuple[int, int]:
    """Width and height of a clip in the picture."""
    _, rows, columns, _ = dense.clip.shape
    return PANEL, round(PANEL * rows / columns)


def _left(place: int) -> int:
    return GAP + place * (PANEL + GAP)


def _sheet(captions: tuple[tuple[str, str], ...], dense: DenseRun) -> Image.Image:
    """Frame without its clips."""
    height = HEAD + _panel(dense)[1]
    image = Image.new("RGB", (_left(len(captions)), height + FOOT), PAPER)
    text = ImageDraw.Draw(image)
    for place, (title, line) in enumerate(captions):
        text.text((_left(place), 10), title, INK, ImageFont.load_default(TITLE))
        text.text((_left(place), 48), line, FAINT, ImageFont.load_default(LINE))
    about = (
        f"One seed of our small video model: {dense.grid.tokens:,} tokens, {STEPS} steps, "
        f"the first {DENSE_STEPS} dense in both"
    )
    text.text((_left(0), height + 14), about, FAINT, ImageFont.load_default(LINE))
    return image


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("assets/dense_and_sparse.webp"))
    parser.add_argument("--seed", type=int, default=SEED, help="another seed, another clip")
    options = parser.parse_args()
    device, what_runs = choose_device()
    print(f"Ran: {what_runs}")
    size = trained.GPU_SIZE if device.type == "cuda" else CPU_SIZE
    row = run(sample_dense(load_dit(None, device), size, options.seed), options.out)
    print(f"{options.out}: {row.name}, {row.density:.1%} of pairs, {row.psnr:.1f} dB")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # as in benchmarks/demo/__main__.py
    main()
