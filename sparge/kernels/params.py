# SPDX-License-Identifier: Apache-2.0
"""Structs that kernels and this library share, read out of ``csrc/params.cuh``: field meanings,
shapes and units stand there.

A test compiles the header and compares every size and offset. With empty slots a field that does
not exist is refused.
"""

from __future__ import annotations

import re
from ctypes import Structure, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

from .source import find_csrc

_SCALARS = {
    "float": c_float,
    "i32": c_int32,
    "i64": c_int64,
    "u32": c_uint32,
    "DType": c_int32,
    "Select": c_int32,
}
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^  (?:const )?(\w+)(\*?)\s+(\w+)(?:\[(\d+)\])?;", re.MULTILINE)


def read_structs(header: str) -> dict[str, Any]:
    """Structs of a header by name. Fields are scalars, arrays of scalars, pointers, and structs
    that stand before them."""
    code = re.sub(r"//[^\n]*", "", header)
    code = re.sub(r"\*\s*\n\s*", "* ", code)  # a pointer whose name is on the next line
    found: dict[str, Any] = {}
    for name, body in _STRUCT.findall(code):
        fields = []
        for kind, pointer, field, count in _FIELD.findall(body):
            of: Any = c_void_p if pointer else _SCALARS.get(kind) or found[kind]
            fields.append((field, of * int(count) if count else of))
        found[name] = type(name, (Structure,), {"__slots__": (), "_fields_": tuple(fields)})
    return found


_structs = read_structs((find_csrc() / "params.cuh").read_text(encoding="utf-8"))

TensorView = _structs["TensorView"]
Problem = _structs["Problem"]
HeadThresholds = _structs["HeadThresholds"]
PoolColumn = _structs["PoolColumn"]
#: Structs that lie in tensors rather than in a parameter block; all their fields are float32.
IN_TENSORS = (HeadThresholds, PoolColumn)

#: The entries of the warpgroup kernels, of 8-bit and of 16-bit operands.
HOPPER_ATTEND = "attend_hopper"
HOPPER_ATTEND_16 = "attend_hopper16"

#: Parameter block of each entry.
PARAMS = {
    "means": _structs["MeansParams"],
    "quantize": _structs["QuantizeParams"],
    "route": _structs["RouteParams"],
    "attend": _structs["AttendParams"],
    HOPPER_ATTEND: _structs["AttendParams"],
    HOPPER_ATTEND_16: _structs["AttendParams"],
    "score": _structs["ScoreParams"],
}

#: What an entry's cubin says beside `LaunchInfo`, where it says more.
SIZES = {
    "means": _structs["MeansSizes"],
    "route": _structs["RouteSizes"],
    "attend": _structs["AttendSizes"],
    "score": _structs["ScoreSizes"],
}
