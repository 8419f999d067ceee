# SPDX-License-Identifier: Apache-2.0
"""Host and device agree on every field of every struct that both know."""

from __future__ import annotations

import ctypes
from ctypes import Structure
from typing import Any

import pytest

from sparge.blocks import KEY_BLOCK, QUERY_BLOCK, STEP_BLOCKS, WORD_BITS
from sparge.kernels.nvrtc import NvrtcError
from sparge.kernels.params import HOPPER_ATTEND, IN_TENSORS, PARAMS, SIZES
from sparge.kernels.source import read_sources
from sparge.kernels.spec import Element, KernelSpec
from sparge.reference.fixed_exp2 import FIXED_TILES, SHIFT

HEADER = "params.cuh"
ANY_SPEC = KernelSpec("means", "sm_80")


def _structs(kind: Any, seen: dict[str, type[Structure]]) -> dict[str, type[Structure]]:
    """``kind`` and every struct inside it, by name."""
    if issubclass(kind, ctypes.Array):
        return _structs(kind._type_, seen)
    if issubclass(kind, Structure):
        seen[kind.__name__] = kind
        for field in kind._fields_:
            _structs(field[1], seen)
    return seen


STRUCTS: dict[str, type[Structure]] = {}
for _entry in (*PARAMS.values(), *IN_TENSORS, *SIZES.values()):
    _structs(_entry, STRUCTS)


def _claims(struct: type[Structure]) -> list[str]:
    """One C++ condition for the size, the alignment, and each field's place and size."""
    name = f"sparge::{struct.__name__}"
    claims = [
        f"sizeof({name}) == {ctypes.sizeof(struct)}",
        f"alignof({name}) == {ctypes.alignment(struct)}",
    ]
    for field, *_ in struct._fields_:
        place = getattr(struct, field)
        # NVRTC has no offsetof; this is what its front end makes of one.
        claims.append(f"__INTADDR__(&(({name}*)0)->{field}) == {place.offset}")
        claims.append(f"sizeof({name}::{field}) == {place.size}")
    return claims


def _compile(
    compiler, claims: list[str], header: str = HEADER, spec: KernelSpec = ANY_SPEC
) -> None:
    """header: one that the kernel's entry reaches."""
    program = f'#include "{header}"\n' + "".join(
        f'static_assert({claim}, "{claim}");\n' for claim in claims
    )
    headers = read_sources(spec.entry).headers
    assert header in headers
    options = [f"--gpu-architecture={spec.arch}", "-std=c++17", "-default-device"]
    compiler.nvrtc.compile("claims.cu", program, headers, [*options, *spec.defines])


def test_layout(compiler):
    _compile(compiler, [claim for struct in STRUCTS.values() for claim in _claims(struct)])
    for struct in IN_TENSORS:
        assert all(field[1] is ctypes.c_float for field in struct._fields_)


def test_constants_are_the_same(compiler):
    sizes = {"kQueryBlock": QUERY_BLOCK, "kKeyBlock": KEY_BLOCK, "kStepBlocks": STEP_BLOCKS}
    sizes |= {"kMapBits": WORD_BITS}
    _compile(compiler, [f"sparge::{name} == {size}" for name, size in sizes.items()])
    with pytest.raises(NvrtcError):
        _compile(compiler, [f"sparge::kStepBlocks == {STEP_BLOCKS + 1}"])
    claims = [
        f"sparge::hopper::kFixedTiles == {FIXED_TILES}",
        f"sparge::hopper::kFixedShift == float({SHIFT!r})",
    ]
    spec = KernelSpec(HOPPER_ATTEND, "sm_90a", element=Element.INT8_E4M3)
    _compile(compiler, claims, "attend/hopper/fixed_exp2.cuh", spec)


def test_each_kind_of_disagreement_is_noticed(compiler):
    struct = PARAMS["attend"]
    field, kind = struct._fields_[-1][:2]

    class Longer(Structure):
        _fields_ = (*struct._fields_, ("added", ctypes.c_int64))

    class Shifted(Structure):
        _fields_ = (*struct._fields_[:-1], ("added", ctypes.c_int64), (field, kind))

    for wrong in (Longer, Shifted):
        wrong.__name__ = struct.__name__
        with pytest.raises(NvrtcError, match="static assertion failed"):
            _compile(compiler, [c for c in _claims(wrong) if "added" not in c])


def test_a_field_that_does_not_exist_is_refused() -> None:
    """Else a kernel would read zero for a name that changed in one place."""
    for struct in STRUCTS.values():
        with pytest.raises(AttributeError):
            struct(no_field=1)
