# SPDX-License-Identifier: Apache-2.0
"""Host and device agree on every field of every struct that both know."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import Structure
from typing import Any

import pytest

from sparge.blocks import KEY_BLOCK, QUERY_BLOCK, STEP_BLOCKS, WORD_BITS
from sparge.kernels.nvrtc import NvrtcError
from sparge.kernels.params import HOPPER_ATTEND, IN_TENSORS, PARAMS, SIZES
from sparge.kernels.source import read_sources
from sparge.kernels.spec import Element, KernelSpec
from tests.oracle.fixed_exp2 import FIXED_TILES, SHIFT


def _structs(kind: Any) -> Iterator[type[Structure]]:
    """``kind`` and every struct inside it."""
    if issubclass(kind, ctypes.Array):
        yield from _structs(kind._type_)
    elif issubclass(kind, Structure):
        yield kind
        for field in kind._fields_:
            yield from _structs(field[1])


ANY_SPEC = KernelSpec("means", "sm_80")
TOLD = (*PARAMS.values(), *IN_TENSORS, *SIZES.values())
STRUCTS = {struct.__name__: struct for kind in TOLD for struct in _structs(kind)}


def _claims(struct: type[Structure]) -> Iterator[str]:
    """One C++ condition for the size, the alignment, and each field's place and size."""
    name = f"sparge::{struct.__name__}"
    yield f"sizeof({name}) == {ctypes.sizeof(struct)}"
    yield f"alignof({name}) == {ctypes.alignment(struct)}"
    for field, *_ in struct._fields_:
        place = getattr(struct, field)
        # NVRTC has no offsetof; this is what its front end makes of one.
        yield f"__INTADDR__(&(({name}*)0)->{field}) == {place.offset}"
        yield f"sizeof({name}::{field}) == {place.size}"


def _compile(compiler, claims: list[str], header="params.cuh", spec=ANY_SPEC) -> None:
    """header: one that the kernel's entry reaches."""
    lines = [f'static_assert({claim}, "{claim}");\n' for claim in claims]
    headers = read_sources(spec.entry).headers
    options = [f"--gpu-architecture={spec.arch}", "-std=c++17", "-default-device", *spec.defines]
    program = f'#include "{header}"\n' + "".join(lines)
    compiler.compile_text("claims.cu", program, headers, options)


def test_layout(compiler):
    _compile(compiler, [claim for struct in STRUCTS.values() for claim in _claims(struct)])
    for struct in IN_TENSORS:
        assert all(field[1] is ctypes.c_float for field in struct._fields_)
    for struct in STRUCTS.values():
        with pytest.raises(AttributeError):  # else a name that changed in one place would be zero
            struct(no_field=1)
    with pytest.raises(NvrtcError, match="static assertion failed"):
        _compile(compiler, [f"sizeof(sparge::MeansParams) == {ctypes.sizeof(PARAMS['means']) + 8}"])


def test_constants_are_the_same(compiler):
    sizes = {"kQueryBlock": QUERY_BLOCK, "kKeyBlock": KEY_BLOCK, "kStepBlocks": STEP_BLOCKS}
    sizes |= {"kMapBits": WORD_BITS}
    _compile(compiler, [f"sparge::{name} == {size}" for name, size in sizes.items()])
    claims = [
        f"sparge::hopper::kFixedTiles == {FIXED_TILES}",
        f"sparge::hopper::kFixedShift == float({SHIFT!r})",
    ]
    spec = KernelSpec(HOPPER_ATTEND, "sm_90a", element=Element.INT8_E4M3)
    _compile(compiler, claims, "attend/hopper/fixed_exp2.cuh", spec)
