# SPDX-License-Identifier: Apache-2.0
"""Draws the icon and the banner that the registry shows: a map of attention, most of it skipped.

python -m tools.pictures [FOLDER]   (assets by default)
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

ICON, BANNER = (400, 400), (1344, 576)
PAPER, SKIPPED, INK, FAINT = (24, 25, 30), (44, 47, 84), (240, 241, 244), (164, 168, 180)
#: Colours of what is computed, from little weight to much.
COMPUTED = ((231, 98, 98), (250, 178, 92), (252, 240, 178))
CELLS, GAP = 12, 0.14
NAME, CLAIM = "Sparge Attention", "Video models render faster"
HOW = "attention without the parts that show least"


def weight(row: int, column: int) -> float:
    """Weight of a block, from 0 to 1: neighbours in time and space count most."""
    near = math.exp(-abs(row - column) / 0.9)
    frame = math.exp(-abs(abs(row - column) - 6) / 0.5) * 0.55
    first = 0.6 if column == 0 else 0.0
    return max(near, frame, first)


def draw_map(image: Image.Image, left: float, top: float, size: float) -> None:
    cells, cell = ImageDraw.Draw(image), size / CELLS
    for row in range(CELLS):
        for column in range(CELLS):
            found = weight(row, column)
            colour = COMPUTED[min(2, int(found * 4) - 1)] if found > 0.3 else SKIPPED
            x, y = left + column * cell, top + row * cell
            edge = cell * (1 - GAP)
            cells.rounded_rectangle((x, y, x + edge, y + edge), cell * 0.18, colour)


def icon() -> Image.Image:
    image = Image.new("RGB", ICON, PAPER)
    draw_map(image, 34, 34, ICON[0] - 68 + 4)
    return image


def banner() -> Image.Image:
    image = Image.new("RGB", BANNER, PAPER)
    size = BANNER[1] - 120
    draw_map(image, 60, 60, size)
    text, left = ImageDraw.Draw(image), size + 130
    text.text((left, 190), NAME, INK, ImageFont.load_default(84))
    text.text((left, 310), CLAIM, FAINT, ImageFont.load_default(38))
    text.text((left, 362), HOW, FAINT, ImageFont.load_default(26))
    return image


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("assets"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    icon().save(folder / "icon.png", optimize=True)
    banner().save(folder / "banner.png", optimize=True)


if __name__ == "__main__":
    main()
