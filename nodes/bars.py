# SPDX-License-Identifier: Apache-2.0
"""Picture of times as bars, for the width of a node."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import ImageDraw
from torch import Tensor

from . import picture

#: Pixels.
TOP, ROW, BAR, NAME_WIDTH, NUMBER_WIDTH = 140, 54, 34, 130, 150


def draw(text: str, rows: Sequence[tuple[str, float]]) -> Tensor:
    """(1, height, width, 3) float32, as ComfyUI's images are. text: a headline and a second line;
    rows: name and seconds of each bar."""
    image = picture.headed(text, TOP + ROW * len(rows) + picture.MARGIN)
    bars, longest = ImageDraw.Draw(image), max(seconds for _, seconds in rows)
    left = picture.MARGIN + NAME_WIDTH
    room = picture.WIDTH - left - NUMBER_WIDTH
    for place, (name, seconds) in enumerate(rows):
        top = TOP + ROW * place
        picture.write(image, name, top + 3, left - 14, picture.INK, picture.TITLE, before=1)
        right = left + max(2, round(room * seconds / longest))
        colour = picture.FAINT if place == 0 else picture.PREDICTED
        bars.rectangle((left, top, right, top + BAR), colour)
        picture.write(image, f"{1000 * seconds:.3g} ms", top + 3, right + 12)
    return picture.as_tensor(image)
