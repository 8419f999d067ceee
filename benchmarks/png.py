# SPDX-License-Identifier: Apache-2.0
"""A PNG file from a tensor, with nothing but the standard library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

RGB = 2  # PNG's colour type


def write_png(path: Path, pixels: Tensor) -> None:
    """Writes pixels (height, width, 3) uint8."""
    height, width, _ = pixels.shape
    unfiltered = torch.zeros(height, 1, dtype=torch.uint8)  # each line names its filter: none
    lines = torch.cat([unfiltered, pixels.cpu().reshape(height, -1)], 1)
    header = struct.pack(">IIBBBBB", width, height, 8, RGB, 0, 0, 0)
    body = zlib.compress(lines.numpy().tobytes(), 9)
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", body), _chunk(b"IEND", b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
