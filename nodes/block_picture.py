# SPDX-License-Identifier: Apache-2.0
"""Picture of the block map of a head: a row for each query block, a column for each key block."""

from __future__ import annotations

from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ..sparge.blocks import KEY_BLOCK, QUERY_BLOCK
from . import picture

LEFT, TOP, BOTTOM = 112, 164, 124
#: Both sides, in pixels: a row stands for twice as many tokens as a column.
SIDE = picture.WIDTH - LEFT - picture.RIGHT


def draw(kept: Tensor, layer: int, head: int, step: int) -> Tensor:
    """(1, height, width, 3) float32, as ComfyUI's images are. kept: (query blocks, key blocks)
    bool; step: from 0."""
    computed = 100 * float(kept.float().mean())
    text = (
        f"Layer {layer}, head {head}: {computed:.0f} % computed\n"
        f"Step {step + 1}. A row is {QUERY_BLOCK} queries, a column {KEY_BLOCK} keys"
    )
    image = picture.headed(text, TOP + SIDE + BOTTOM)
    # A pixel may stand for several blocks, or a block for several pixels.
    shares = adaptive_avg_pool2d(kept.float().unsqueeze(0), SIDE)[0]
    image.paste(picture.from_pixels(picture.coloured(shares)), (LEFT, TOP))
    _axes(image, *kept.shape)
    picture.scale(image, TOP + SIDE + 82)
    return picture.as_tensor(image)


def _axes(image: Image.Image, query_blocks: int, key_blocks: int) -> None:
    bottom = TOP + SIDE
    for number, at in _ticks(query_blocks, 40):
        picture.write(image, number, TOP + at - 14, LEFT - 12, before=1)
    for number, at in _ticks(key_blocks, 64):
        picture.write(image, number, bottom + 8, LEFT + at, before=0.5)
    titled = picture.INK, picture.TITLE
    picture.write(image, "query block", TOP - 38, LEFT - 88, *titled)
    picture.write(image, "key block", bottom + 36, LEFT + SIDE / 2, *titled, before=0.5)


def _ticks(blocks: int, room: int) -> list[tuple[str, int]]:
    """Numbers of blocks, from 0, and their places in pixels."""
    cell = SIDE / blocks
    every = picture.interval(cell, room)
    return [(str(block), round((block + 0.5) * cell)) for block in range(0, blocks, every)]
