# SPDX-License-Identifier: Apache-2.0
"""Safetensors files as byte ranges: headers are read, tensors are copied unread.

A checkpoint of any size passes through in pieces of a few MiB, in whatever dtype it has.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Protocol

HEADER_LIMIT = 100 << 20  # the format's own bound on the length of a header
PIECE = 8 << 20  # large enough that a disk streams, small enough to be no memory at all


class ConversionError(ValueError):
    """The files given cannot be converted; the text is the sentence a user reads."""


class TensorData(Protocol):
    """A tensor that can be written: a range of another file, or bytes made here."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def length(self) -> int: ...

    def copy_to(self, target: BinaryIO) -> None: ...


@dataclass(frozen=True)
class FileTensor:
    """A tensor as it lies in a file; `dtype` is the format's name for it, such as "BF16"."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int

    def copy_to(self, target: BinaryIO) -> None:
        with self.path.open("rb") as source:
            source.seek(self.start)
            left = self.length
            while left:
                piece = source.read(min(PIECE, left))
                if not piece:
                    raise ConversionError(f"{self.path.name} ended early; download it again")
                target.write(piece)
                left -= len(piece)


@dataclass(frozen=True)
class NewTensor:
    """A tensor that no source file holds."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)

    def copy_to(self, target: BinaryIO) -> None:
        target.write(self.data)


def read_tensors(path: Path) -> dict[str, FileTensor]:
    """Every tensor of a safetensors file by name, without reading one.

    Raises ConversionError for anything that is not a complete safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= header_length <= min(HEADER_LIMIT, size - 8):
            raise ConversionError(f"{path.name} is not a safetensors file, or is cut off")
        try:
            header = json.loads(file.read(header_length))
        except ValueError as error:
            raise ConversionError(f"{path.name} has a damaged header") from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        start = 8 + header_length + begin
        if begin > end or start + (end - begin) > size:
            raise ConversionError(f"{path.name} is cut off inside {name}; download it again")
        tensors[name] = FileTensor(path, entry["dtype"], tuple(entry["shape"]), start, end - begin)
    return tensors


def parameter_count(tensors: Mapping[str, TensorData]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, TensorData]) -> None:
    """Writes a safetensors file beside `path` and renames it, so `path` is never half written.

    Raises ConversionError where the folder lacks the space, OSError where it cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.length],
        }
        offset += tensor.length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data start on an 8-byte boundary, as readers map them

    free = shutil.disk_usage(path.parent).free
    if free < offset:
        raise ConversionError(
            f"{path.parent} has {free / 1e9:.1f} GB free and the file needs {offset / 1e9:.1f} GB"
        )
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as target:
            target.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors.values():
                tensor.copy_to(target)
        os.chmod(temporary, 0o644)  # mkstemp's owner-only mode is not what a model folder wants
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
