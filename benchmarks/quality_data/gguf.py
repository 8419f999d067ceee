# SPDX-License-Identifier: Apache-2.0
"""A GGUF file: its facts and its tensors, for the few types that the small models here use.

Layout (GGUF 3, little endian): magic, version, counts; then (key, type, value) facts; then (name,
shape with the fastest axis first, type, offset) of each tensor; then, aligned, the tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality_data.wheel import Bytes

Floats = NDArray[np.float32]

MAGIC, VERSION = 0x46554747, 3
STRING, ARRAY = 8, 9
SCALARS: dict[int, str] = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)
GROUP = 32  # elements that share a scale in the quantized types


@dataclass(frozen=True, eq=False)
class Gguf:
    facts: dict[str, Any]
    tensors: dict[str, Floats]
    """float32, slowest axis first: a matrix is (out, in)."""


def read_gguf(data: Bytes) -> Gguf:
    """Reads everything in the file, dequantized.

    Raises:
        ValueError: not GGUF 3, or a tensor of another type than F32, F16, Q4_1 and Q8_0.
    """
    cursor = _Cursor(data)
    magic, version = cursor.scalar("I"), cursor.scalar("I")
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"Not a GGUF {VERSION} file (magic {magic:#x}, version {version}).")
    tensor_count, fact_count = cursor.scalar("Q"), cursor.scalar("Q")
    facts = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(fact_count)}
    headers = [_header(cursor) for _ in range(tensor_count)]
    alignment = facts.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    return Gguf(facts, {header.name: _load(data[start:], header) for header in headers})


@dataclass
class _Cursor:
    data: Bytes
    at: int = field(default=0)

    def take(self, size: int) -> bytes:
        taken = self.data[self.at : self.at + size].tobytes()
        if len(taken) != size:
            raise ValueError("The GGUF file ends early; it is cut short.")
        self.at += size
        return taken

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element = self.scalar("I")
            return [self.value(element) for _ in range(self.scalar("Q"))]
        if kind not in SCALARS:
            raise ValueError(f"A fact has type {kind}, which GGUF {VERSION} does not have.")
        return self.scalar(SCALARS[kind])


class _Header(NamedTuple):
    name: str
    shape: tuple[int, ...]  # slowest axis first
    kind: int
    offset: int  # from the first tensor


def _header(cursor: _Cursor) -> _Header:
    name = cursor.string()
    axes = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    return _Header(name, tuple(reversed(axes)), cursor.scalar("I"), cursor.scalar("Q"))


def _load(data: Bytes, header: _Header) -> Floats:
    name, shape, kind, offset = header
    if kind not in TYPES:
        raise ValueError(f"{name} has GGML type {kind}; this reader knows {sorted(TYPES)}.")
    group_bytes, group, decode = TYPES[kind]
    groups = math.prod(shape) // group
    raw = data[offset : offset + groups * group_bytes]
    if len(raw) != groups * group_bytes:
        raise ValueError(f"The GGUF file ends inside {name}; it is cut short.")
    return decode(np.asarray(raw).reshape(groups, group_bytes)).reshape(shape)


def _f32(raw: Bytes) -> Floats:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: Bytes) -> Floats:
    return raw.view("<f2").astype(np.float32)


def _q8_0(raw: Bytes) -> Floats:
    """Decodes Q8_0: scale (F16), 32 signed bytes."""
    return _f16(raw[:, :2].copy()) * raw[:, 2:].view(np.int8)


def _q4_1(raw: Bytes) -> Floats:
    """Decodes Q4_1: scale and least value (F16), 16 bytes, elements 0-15 in the low halves, 16-31
    in the high."""
    scale, least = _f16(raw[:, :2].copy()), _f16(raw[:, 2:4].copy())
    return scale * np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], 1) + least


#: Layout by GGML type: bytes a group, elements a group, decoder of (groups, bytes) to (groups,
#: elements).
TYPES: dict[int, tuple[int, int, Callable[[Bytes], Floats]]] = {
    0: (4, 1, _f32),
    1: (2, 1, _f16),
    3: (20, GROUP, _q4_1),
    8: (34, GROUP, _q8_0),
}
