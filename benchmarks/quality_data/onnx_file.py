# SPDX-License-Identifier: Apache-2.0
"""Float32 tensors of an ONNX file: as much of protobuf and of onnx.proto3 as that takes.

A protobuf message is a run of (field number and wire type, value); a nested message is a value of
bytes. Field numbers below are those of onnx.proto3: ModelProto, GraphProto, NodeProto, TensorProto.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality_data.wheel import Bytes

FLOAT = 1  # TensorProto.DataType

Value = int | memoryview


def read_tensors(data: Bytes) -> dict[str, NDArray[np.float32]]:
    """Every float32 initializer, by name; views of `data` where it is aligned.

    An exporter gives what it folded or transposed a number for a name. A tensor is therefore also
    filed under the name of each node that reads it, when that node reads no other.

    Raises:
        ValueError: the data is not an ONNX model with its weights inside.
    """
    (graph,) = _children(data.data, 7) or (None,)
    if graph is None:
        raise ValueError("This is no ONNX model: it has no graph. Give the .onnx file itself.")
    tensors = dict(_tensors(graph))
    for node in _children(graph, 1):
        read = [name for name in map(_text, _children(node, 1)) if name in tensors]
        if len(read) == 1:
            tensors.setdefault(_text(_children(node, 3)[0]), tensors[read[0]])
    return tensors


def _tensors(graph: memoryview) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for tensor in _children(graph, 5):
        shape: list[int] = []
        name, kind, raw = "", 0, None
        for field, value in _fields(tensor):
            if field == 1:
                shape += [value] if isinstance(value, int) else _varints(value)
            elif field == 2 and isinstance(value, int):
                kind = value
            elif field == 8 and isinstance(value, memoryview):
                name = _text(value)
            elif field == 9:
                raw = value
        if kind != FLOAT:
            continue
        if not isinstance(raw, memoryview):
            raise ValueError(f"{name} has no raw data: its weights stand outside the .onnx file.")
        yield name, np.frombuffer(raw, "<f4").reshape(shape)


def _children(message: memoryview, field: int) -> list[memoryview]:
    return [v for f, v in _fields(message) if f == field and isinstance(v, memoryview)]


def _fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(message, at)
        else:
            if wire == 2:
                size, at = _varint(message, at)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise ValueError(f"Wire type {wire} is not protobuf's; the file is damaged.")
            if at + size > len(message):
                raise ValueError("The file ends inside a field; it is cut short.")
            value, at = message[at : at + size], at + size
        yield tag >> 3, value


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Reads seven bits a byte, lowest first; a set top bit says that more follow."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(message):
            raise ValueError("The file ends inside a number; it is cut short.")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("A number has more than 64 bits; this is not protobuf.")


def _varints(packed: memoryview) -> list[int]:
    values, at = [], 0
    while at < len(packed):
        value, at = _varint(packed, at)
        values.append(value)
    return values


def _text(value: memoryview) -> str:
    return bytes(value).decode()
