# SPDX-License-Identifier: Apache-2.0
"""Entries that are not what their name says are built anew, and nothing else happens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparge.kernels.cubin import check_image
from sparge.kernels.entry import LARGEST
from sparge.kernels.source import read_sources
from sparge.kernels.spec import KernelSpec
from sparge.kernels.store import Store

SPEC = KernelSpec("means", "sm_90a")
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")


@dataclasses.dataclass
class Kept:
    """An entry in a cache, to be damaged."""

    path: Path
    image: bytes
    get: Callable[[KernelSpec], Any]
    compiled: list[KernelSpec]

    @property
    def beside(self) -> Path:
        return self.path.with_suffix(".json")

    def write(self, image: bytes | None = None, **facts: Any) -> None:
        """Writes an entry with a checksum that fits, unless it is given."""
        image = self.image if image is None else image
        told = json.loads(self.beside.read_text())
        self.path.write_bytes(image)
        told |= {"sha256": hashlib.sha256(image).hexdigest(), **facts}
        self.beside.write_text(json.dumps(without_missing(told)))


MISSING = "missing"


def without_missing(told: dict[str, Any]) -> dict[str, Any]:
    return {name: fact for name, fact in told.items() if fact is not MISSING}


@pytest.fixture
def kept(csrc, tmp_path, counting) -> Kept:
    cache = tmp_path / "cache"

    def get(spec: KernelSpec) -> Any:
        return Store(cache).get(spec, read_sources(spec.entry, csrc), counting)

    image = get(SPEC).image
    path = Store(cache).path(SPEC, read_sources("means", csrc), counting)
    assert path is not None and path.read_bytes() == image
    counting.compiled.clear()
    return Kept(path, image, get, counting.compiled)


def built_anew(kept: Kept) -> bool:
    """Whether the entry was, and is whole and read afterwards."""
    kept.compiled.clear()
    assert kept.get(SPEC).image == kept.image
    anew = kept.compiled == [SPEC]
    kept.compiled.clear()
    assert kept.get(SPEC).image == kept.image and kept.compiled == []
    return anew


def test_a_whole_entry_is_read(kept):
    assert not built_anew(kept)
    kept.write()
    assert not built_anew(kept)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(SPEC, head_dim=64),
        dataclasses.replace(SPEC, arch="sm_80"),
        KernelSpec("route", "sm_90a"),
    ],
    ids=lambda spec: spec.id,
)
def test_another_kernel_under_this_name_is_built_anew(kept, other, csrc, counting):
    theirs = kept.get(other)
    path = Store(kept.path.parent).path(other, read_sources(other.entry, csrc), counting)
    assert path is not None
    kept.path.write_bytes(path.read_bytes())
    kept.beside.write_bytes(path.with_suffix(".json").read_bytes())
    assert built_anew(kept), "both files of another entry"
    if other.head_dim == SPEC.head_dim:
        kept.write(theirs.image)
        assert built_anew(kept), "its image, with a JSON that fits both"


@pytest.mark.parametrize(
    "change",
    [
        *({field: MISSING} for field in ("name", "target", "sha256", "report")),
        {"name": "means"}, {"name": None}, {"name": 5}, {"target": "sm_80"}, {"target": []},
        {"sha256": "0" * 64}, {"sha256": None}, {"report": 5}, {"report": []}, {"report": {}},
    ],
    ids=str,
)  # fmt: skip
def test_facts_that_do_not_fit(kept, change):
    kept.write(**change)
    assert built_anew(kept)


@pytest.mark.parametrize(
    "change",
    [
        {"registers": "40"}, {"registers": -1}, {"registers": None}, {"registers": True},
        {"stack": 1.5}, {"notes": 5}, {"notes": [5]}, {"notes": ["\ud800"]},
        {"registers": MISSING},
    ],
    ids=str,
)  # fmt: skip
def test_reports_that_are_none(kept, change):
    report = json.loads(kept.beside.read_text())["report"]
    kept.write(report=without_missing(report | change))
    assert built_anew(kept)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
     b"\0" * 100, b'{"sha256":' + b"9" * 5000 + b"}"],
    ids=lambda text: ascii(text[:12]),
)  # fmt: skip
def test_json_that_is_none(kept, text):
    kept.beside.write_bytes(text)
    assert built_anew(kept)


def patched(image: bytes, at: int, layout: str, *values: int) -> bytes:
    changed = bytearray(image)
    struct.pack_into(layout, changed, at, *values)
    return bytes(changed)


JUNK: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda image: b"",
    "text": lambda image: b"// PTX, perhaps",
    "206 bytes": lambda image: b"\x7fELF\x02\x01" + b"\0" * 200,
    "ones": lambda image: image[:64] + b"\xff" * (len(image) - 64),
    "half": lambda image: image[: len(image) // 2],
    "no section": lambda image: patched(image, 0x3C, "<H", 0),
    "small sections": lambda image: patched(image, 0x3A, "<H", 1),
    "sections far away": lambda image: patched(image, 0x28, "<Q", 2**64 - 1),
    "all sections symbols": lambda image: many_tables(image),
    "another machine": lambda image: patched(image, 0x12, "<H", 62),
    "another target": lambda image: image[:0x30] + bytes([4, 80, 0, 6]) + image[0x34:],
    "no kernel": lambda image: image.replace(b"\0means\0", b"\0smean\0"),
    "no launch_info": lambda image: image.replace(b"launch_info\0", b"launch_ofni\0"),
    "no threads": lambda image: image.replace(LAUNCH, struct.pack("<II", 0, 4096)),
    "too many threads": lambda image: image.replace(LAUNCH, struct.pack("<II", 1056, 4096)),
    "too much shared": lambda image: image.replace(LAUNCH, struct.pack("<II", 96, 2**31)),
}
LAUNCH = struct.pack("<II", 96, 4096)


def many_tables(image: bytes) -> bytes:
    table, count = (
        struct.unpack_from("<Q", image, 0x28)[0],
        struct.unpack_from("<H", image, 0x3C)[0],
    )
    for index in range(count):
        image = patched(image, table + 64 * index + 4, "<I", 2)
        image = patched(image, table + 64 * index + 32, "<Q", 2**40)
    return image


@pytest.mark.parametrize("kind", JUNK)
def test_junk_with_its_own_checksum(kept, kind, caplog):
    junk = JUNK[kind](kept.image)
    assert junk != kept.image
    kept.write(junk)
    with caplog.at_level(logging.WARNING, "sparge"):
        assert built_anew(kept)
    assert [kept.path.name in record.message for record in caplog.records] == [True]


def test_flipped_bytes_raise_nothing_but_value_errors(kept, seed):
    chance = random.Random(seed)
    refused = 0
    for _ in range(2000):
        image = bytearray(kept.image)
        for _ in range(chance.choice((1, 1, 8, 64))):
            image[chance.randrange(len(image))] = chance.choice((0, 1, 255, chance.randrange(256)))
        end = chance.choice((len(image), chance.randrange(len(image))))
        try:
            check_image(bytes(image[:end]), SPEC)
        except ValueError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize("which", ["cubin", "json"])
@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "dangling", "huge"])
@posix
def test_what_is_no_file(kept, which, kind, tmp_path):
    path = kept.path if which == "cubin" else kept.beside
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(LARGEST + 1)
    else:
        path.symlink_to(path if kind == "loop" else tmp_path / "none")
    if kind == "folder":  # no file takes its place: kernels stay in memory
        assert kept.get(SPEC).image == kept.image and kept.compiled == [SPEC]
        return
    assert built_anew(kept)
    assert not (tmp_path / "none").exists(), "no link is written through"


@posix
@pytest.mark.parametrize("why", ["mode", "owner"])
def test_an_entry_that_others_may_write_is_built_anew(kept, why):
    if why == "owner" and os.geteuid() != 0:
        pytest.skip("needs root, to give files away")
    for path in (kept.path, kept.beside):
        path.chmod(0o666) if why == "mode" else os.chown(path, 12345, 12345)
        assert built_anew(kept)
        assert path.stat().st_mode & 0o022 == 0 and path.stat().st_uid == os.geteuid()


@posix
@pytest.mark.parametrize(("umask", "mode"), [(0, 0o644), (0o022, 0o644), (0o077, 0o600)])
def test_modes_of_what_is_written(kept, umask, mode):
    for path in (kept.path, kept.beside):
        path.unlink()
    before = os.umask(umask)
    try:
        assert built_anew(kept)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (kept.path, kept.beside)} == {mode}
