# SPDX-License-Identifier: Apache-2.0
"""An animated GIF from a tensor, with nothing but the standard library.

GIF89a. One palette for all pictures (6 levels of red, 7 of green, 6 of blue); a 4 x 4 ordered
dither hides the steps.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from torch import Tensor

LEVELS = (6, 7, 6)  # 252 of the 256 colours; the eye is keenest for green
CODE_BITS = 8
LAST_CODE = 4095  # codes grow to 12 bits
BAYER = ((0, 8, 2, 10), (12, 4, 14, 6), (3, 11, 1, 9), (15, 7, 13, 5))


def write_gif(path: Path, frames: Tensor, frames_per_second: int = 12) -> None:
    """Writes frames (count, height, width, 3) float in [0, 1], repeating for ever."""
    count, height, width, _ = frames.shape
    indices = _dithered(frames.cpu()).to(torch.uint8).reshape(count, -1).numpy()
    delay = round(100 / frames_per_second)
    with path.open("wb") as file:
        file.write(b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF7, 0, 0) + _palette())
        file.write(b"!\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")
        for frame in indices:
            file.write(struct.pack("<BBBBHBB", 0x21, 0xF9, 4, 0, delay, 0, 0))
            file.write(struct.pack("<BHHHHBB", 0x2C, 0, 0, width, height, 0, CODE_BITS))
            file.write(_blocks(_lzw(frame.tobytes())))
        file.write(b";")


def _dithered(frames: Tensor) -> Tensor:
    """(count, height, width) palette index."""
    height, width = frames.shape[1:3]
    pattern = (torch.tensor(BAYER) + 0.5) / 16
    tiled = pattern.repeat(height // 4 + 1, width // 4 + 1)[:height, :width, None]
    steps = torch.tensor(LEVELS) - 1
    levels = (frames.clamp(0, 1) * steps + tiled).floor().clamp(max=steps).long()
    red, green, blue = levels.unbind(-1)
    return (red * LEVELS[1] + green) * LEVELS[2] + blue


def _palette() -> bytes:
    reds, greens, blues = ([round(255 * i / (n - 1)) for i in range(n)] for n in LEVELS)
    colours = [bytes((r, g, b)) for r in reds for g in greens for b in blues]
    return b"".join(colours).ljust(3 * 256, b"\0")


def _lzw(pixels: bytes) -> bytes:
    """The codes of a picture, packed from the lowest bit."""
    clear, end = 1 << CODE_BITS, (1 << CODE_BITS) + 1
    table: dict[tuple[int, int], int] = {}
    bits, held, length = CODE_BITS + 1, 0, 0
    packed = bytearray()

    def put(code: int) -> None:
        nonlocal held, length
        held |= code << length
        length += bits
        while length >= 8:
            packed.append(held & 255)
            held >>= 8
            length -= 8

    put(clear)
    prefix = pixels[0]
    for pixel in pixels[1:]:
        longer = table.get((prefix, pixel))
        if longer is not None:
            prefix = longer
            continue
        put(prefix)
        code = end + 1 + len(table)
        if code > LAST_CODE:
            put(clear)
            table.clear()
            bits = CODE_BITS + 1
        else:
            table[prefix, pixel] = code
            if code == 1 << bits:
                bits += 1
        prefix = pixel
    put(prefix)
    put(end)
    packed.append(held & 255)
    return bytes(packed)


def _blocks(codes: bytes) -> bytes:
    """Pieces of at most 255 bytes, each with its length before it, and an empty one at the end."""
    pieces = [codes[i : i + 255] for i in range(0, len(codes), 255)]
    return b"".join(bytes([len(piece)]) + piece for piece in pieces) + b"\0"
