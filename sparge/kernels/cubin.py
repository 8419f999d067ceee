# SPDX-License-Identifier: Apache-2.0
"""Facts that travel inside a cubin, read from its ELF without a driver or GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ctypes import Structure, sizeof
from dataclasses import dataclass

from .params import SIZES
from .spec import ARCHS

_SYMBOL_TABLE = 2
_NO_BITS = 8
_SECTION_BYTES = 64
_SYMBOL_BYTES = 24
#: Bytes of a block's shared memory that the driver keeps; cubins from this target on count them.
_KEPT, _KEPT_FROM = 1024, 90


@dataclass(frozen=True)
class LaunchInfo:
    """The device code's own word on how to launch it: threads a block, dynamic shared bytes."""

    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: the ELF image, and what the assembler said of it."""

    image: bytes
    log: str


def read_launch_info(image: bytes) -> LaunchInfo:
    """Read ``extern "C" __device__ const {uint32 threads, shared_bytes} launch_info``.

    Raises ValueError when the image is no 64-bit ELF file or has no such initialised symbol.
    """
    return LaunchInfo(*struct.unpack("<II", _constant(image, "launch_info", "LaunchInfo", 8)))


def read_sizes(image: bytes, entry: str) -> Structure | None:
    """Its ``launch_sizes``, a struct of `SIZES`; None where the entry has none.

    Raises ValueError as `read_launch_info` does.
    """
    kind = SIZES.get(entry)
    if kind is None:
        return None
    data = _constant(image, "launch_sizes", kind.__name__, sizeof(kind))
    return kind.from_buffer_copy(data)


def read_static_shared(image: bytes, entry: str) -> int:
    """Bytes of shared memory that the kernel declares itself."""
    for section, _ in _symbols(image, f".nv.shared.{entry}".encode()):
        kept = _KEPT if any(target >= _KEPT_FROM for target in _targets(image)) else 0
        return max(0, section.size - kept)
    return 0


def _constant(image: bytes, name: str, kind: str, size: int) -> bytes:
    for section, offset in _symbols(image, name.encode()):
        if section.kind != _NO_BITS:
            at = section.offset + offset
            if at + size > len(image):
                raise ValueError("the cubin is cut short")
            return image[at : at + size]
    raise ValueError(
        f"the cubin has no initialised symbol {name}: its entry file must define "
        f'extern "C" __device__ const {kind} {name}'
    )


def _targets(image: bytes) -> set[int]:
    """One target, or none that is built for."""
    # Which of the two bytes it is depends on the ELF's version.
    return {arch.number for arch in ARCHS.values()}.intersection(_unpack("<BB", image, 0x30))


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


def _unpack(layout: str, image: bytes, at: int) -> tuple[int, ...]:
    if at + struct.calcsize(layout) > len(image):
        raise ValueError("the cubin is cut short")
    return struct.unpack_from(layout, image, at)


def _sections(image: bytes) -> list[_Section]:
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a cubin: no little-endian 64-bit ELF header")
    (table,) = _unpack("<Q", image, 0x28)
    size, count = _unpack("<HH", image, 0x3A)
    if size != _SECTION_BYTES:
        raise ValueError(f"not a cubin: its section headers have {size} bytes")
    sections = []
    for at in range(table, table + count * size, size):
        _, kind, _, _, offset, length, link = _unpack("<IIQQQQI", image, at)
        sections.append(_Section(kind, offset, length, link))
    return sections


def _symbols(image: bytes, wanted: bytes) -> Iterator[tuple[_Section, int]]:
    """Section of each defined symbol called ``wanted``, and its offset there; ``launch_info`` is
    LOCAL, being ``const``."""
    sections = _sections(image)
    for table in (section for section in sections if section.kind == _SYMBOL_TABLE):
        names = sections[table.link].offset
        for at in range(table.offset, table.offset + table.size, _SYMBOL_BYTES):
            name, _, _, section, value, _ = _unpack("<IBBHQQ", image, at)
            start = names + name
            if image[start : start + len(wanted) + 1] == wanted + b"\0" and (
                0 < section < len(sections)
            ):
                yield sections[section], value
