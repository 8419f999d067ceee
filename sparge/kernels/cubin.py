# SPDX-License-Identifier: Apache-2.0
"""Facts that travel inside a cubin, read from its ELF without a driver or GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .report import Report

_SYMBOL_TABLE = 2
_NO_BITS = 8


@dataclass(frozen=True)
class LaunchInfo:
    """The device code's own word on how to launch it: threads a block, dynamic shared bytes."""

    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: the ELF image and what the assembler said about it."""

    image: bytes
    report: Report | None

    @property
    def info(self) -> LaunchInfo:
        return read_launch_info(self.image)


def read_launch_info(image: bytes) -> LaunchInfo:
    """Read ``extern "C" __device__ const {uint32 threads, shared_bytes} launch_info``.

    Raises ValueError when the image is no 64-bit ELF file or has no such initialised symbol.
    """
    try:
        return LaunchInfo(*struct.unpack_from("<II", image, _file_offset(image, b"launch_info")))
    except struct.error as error:
        raise ValueError(f"the cubin is cut short: {error}") from None


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


def _file_offset(image: bytes, symbol: bytes) -> int:
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a cubin: no little-endian 64-bit ELF header")
    sections = list(_sections(image))
    for section, value in _symbols(image, sections, symbol):
        if section.kind != _NO_BITS:
            return section.offset + value
    raise ValueError(
        f"the cubin has no initialised symbol {symbol.decode()}: its entry file must define "
        'extern "C" __device__ const LaunchInfo launch_info'
    )


def _sections(image: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    for at in range(table, table + count * size, size):
        _, kind, _, _, offset, length, link = struct.unpack_from("<IIQQQQI", image, at)
        yield _Section(kind, offset, length, link)


def _symbols(
    image: bytes, sections: list[_Section], wanted: bytes
) -> Iterator[tuple[_Section, int]]:
    """(section, offset in it) of each symbol called ``wanted``; it is LOCAL, being ``const``."""
    for table in sections:
        if table.kind != _SYMBOL_TABLE:
            continue
        names = sections[table.link].offset
        for at in range(table.offset, table.offset + table.size, 24):
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, at)
            start = names + name
            if image[start : start + len(wanted) + 1] == wanted + b"\0" and (
                0 < section < len(sections)
            ):
                yield sections[section], value
