# SPDX-License-Identifier: Apache-2.0
"""Safetensors files as byte ranges: headers are read, tensors are copied unread.

A checkpoint of any size passes through in pieces of a few MiB, in whatever dtype it has.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeGuard

from ..common.whole_file import written_whole
from .json_text import ConversionError, read_json, shown

HEADER_LIMIT = 4 << 20  # of the published models, 1,000 to 2,000 tensors a file, it is 200 KB
PIECE = 8 << 20  # large enough that a disk streams, small enough to be no memory at all
#: Bytes of a number, by the format's name: those that weights are stored in.
NUMBER_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
LONGEST_SHAPE = 8


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
    data: bytes | memoryview
    """One byte an element."""

    @property
    def length(self) -> int:
        return len(self.data)

    def copy_to(self, target: BinaryIO) -> None:
        target.write(self.data)


def read_tensors(path: Path) -> dict[str, FileTensor]:
    """Every tensor of a safetensors file by name, without reading one.

    Raises ConversionError for anything that is not a complete safetensors file of weights: each
    tensor has the bytes that its type and shape take, and together they fill the file.
    """
    header, first = read_header(path)
    size = path.stat().st_size
    if not isinstance(metadata := header.pop("__metadata__", {}), dict):
        raise ConversionError(f"{path.name} has a damaged header: metadata {shown(metadata)}")
    tensors = {name: _file_tensor(path, name, header[name], first, size) for name in header}
    _check_fill(path, tensors, first, size)
    return tensors


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Entry of each tensor by name in the header of a safetensors file, unchecked, and the byte at
    which the tensors begin.

    Raises ConversionError for what is no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= header_length <= size - 8:
            raise ConversionError(f"{path.name} is not a safetensors file, or is cut off")
        if header_length > HEADER_LIMIT:
            raise ConversionError(
                f"{path.name} has a header of {header_length / 1e6:.1f} MB, where a transformer's"
                " has less than one; give the shards as they were published"
            )
        header = read_json(file.read(header_length), f"the header of {path.name}")
    return header, 8 + header_length


def _file_tensor(path: Path, name: str, entry: Any, first: int, size: int) -> FileTensor:
    """first: where in the file tensors begin."""
    where = f"{path.name} has a damaged header: {shown(name)}"
    if not isinstance(entry, dict):
        raise ConversionError(f"{where} is described by {shown(entry)}")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in NUMBER_BYTES:
        raise ConversionError(
            f"{path.name}: {shown(name)} has type {shown(dtype)}; weights are converted that have"
            f" one of {', '.join(NUMBER_BYTES)}"
        )
    if not _are_counts(shape) or len(shape) > LONGEST_SHAPE:
        raise ConversionError(f"{where} has shape {shown(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ConversionError(f"{where} has data_offsets {shown(offsets)}")
    begin, end = offsets
    if first + end > size:
        raise ConversionError(f"{path.name} is cut off inside {shown(name)}; download it again")
    needed = prod(shape) * NUMBER_BYTES[dtype]
    if end - begin != needed:
        raise ConversionError(
            f"{where} has {end - begin} bytes, and {dtype} of shape {shown(shape)} takes"
            f" {shown(needed)}"
        )
    return FileTensor(path, dtype, tuple(shape), first + begin, end - begin)


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_fill(path: Path, tensors: Mapping[str, FileTensor], first: int, size: int) -> None:
    """One tensor after the other, as readers of the format demand."""
    at = first
    for name, tensor in sorted(tensors.items(), key=lambda t: (t[1].start, t[1].length)):
        if tensor.start != at:
            kind = "lies over another tensor" if tensor.start < at else "leaves a gap before it"
            raise ConversionError(f"{path.name} has a damaged header: {shown(name)} {kind}")
        at += tensor.length
    if at != size:
        raise ConversionError(f"{path.name} has {size - at} bytes that belong to no tensor")


def parameter_count(tensors: Mapping[str, TensorData]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, TensorData]) -> None:
    """Writes a safetensors file beside `path` and renames it, so `path` is never half written.

    Raises ConversionError where the folder lacks the space, OSError where it cannot be written.
    """
    # Wide numbers first: each tensor then begins where its numbers may lie.
    ordered = sorted(tensors.items(), key=lambda named: -NUMBER_BYTES[named[1].dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
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
    with written_whole(path) as target:
        target.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            tensor.copy_to(target)
