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
MISSING = "missing"
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

    def built_anew(self) -> bool:
        """Whether the entry was, and is whole and read afterwards."""
        self.compiled.clear()
        assert self.get(SPEC).image == self.image
        anew = self.compiled == [SPEC]
        self.compiled.clear()
        assert self.get(SPEC).image == self.image and self.compiled == []
        return anew


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
    return Kept(path, image, get, counting.compiled)


def test_a_whole_entry_is_read_and_another_kernel_under_its_name_is_not(kept, csrc, counting):
    assert not kept.built_anew()
    kept.write()
    assert not kept.built_anew()
    smaller = dataclasses.replace(SPEC, head_dim=64)
    for other in (smaller, dataclasses.replace(SPEC, arch="sm_80"), KernelSpec("route", "sm_90a")):
        theirs = kept.get(other)
        path = Store(kept.path.parent).path(other, read_sources(other.entry, csrc), counting)
        assert path is not None
        kept.path.write_bytes(path.read_bytes())
        kept.beside.write_bytes(path.with_suffix(".json").read_bytes())
        assert kept.built_anew(), "both files of another entry"
        if other is not smaller:
            kept.write(theirs.image)
            assert kept.built_anew(), "its image, with a JSON that fits both"


def test_a_json_that_is_none_or_does_not_fit(kept):
    facts = [
        *({field: MISSING} for field in ("name", "target", "sha256", "log")),
        {"name": "means"}, {"target": "sm_80"}, {"sha256": "0" * 64}, {"sha256": None},
    ]  # fmt: skip
    for change in facts:
        kept.write(**change)
        assert kept.built_anew(), change
    for text in (b"", b"{", b"null", b"\xff\xfe", b"[" * 100_000, b'{"sha256":' + b"9" * 5000):
        kept.beside.write_bytes(text)
        assert kept.built_anew(), text[:12]


def patched(image: bytes, at: int, layout: str, *values: int) -> bytes:
    changed = bytearray(image)
    struct.pack_into(layout, changed, at, *values)
    return bytes(changed)


def sections_at(image: bytes) -> int:
    return struct.unpack_from("<Q", image, 0x28)[0]


LAUNCH = struct.pack("<II", 96, 4096)
JUNK: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda image: b"",
    "half": lambda image: image[: len(image) // 2],
    "no section": lambda image: patched(image, 0x3C, "<H", 0),
    "sections far away": lambda image: patched(image, 0x28, "<Q", 2**64 - 1),
    "two symbol tables": lambda image: patched(image, sections_at(image) + 64 + 4, "<I", 2),
    "another machine": lambda image: patched(image, 0x12, "<H", 62),
    "another target": lambda image: image[:0x30] + bytes([4, 80, 0, 6]) + image[0x34:],
    "no kernel": lambda image: image.replace(b"\0means\0", b"\0smean\0"),
    "no launch_info": lambda image: image.replace(b"launch_info\0", b"launch_ofni\0"),
    "no threads": lambda image: image.replace(LAUNCH, struct.pack("<II", 0, 4096)),
    "too many threads": lambda image: image.replace(LAUNCH, struct.pack("<II", 1056, 4096)),
    "too much shared": lambda image: image.replace(LAUNCH, struct.pack("<II", 96, 2**31)),
}


def test_junk_with_its_own_checksum(kept, caplog, seed):
    for kind, make in JUNK.items():
        junk = make(kept.image)
        assert junk != kept.image
        kept.write(junk)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "sparge"):
            assert kept.built_anew(), kind
        assert [kept.path.name in record.message for record in caplog.records] == [True], kind
    # Flipped bytes raise nothing but ValueError, in the header and the tables of sections and
    # symbols as elsewhere.
    chance, refused = random.Random(seed), 0
    whole = len(kept.image)
    for _ in range(1000):
        image = bytearray(kept.image)
        first, last = chance.choice(((0, 64), (sections_at(kept.image), whole), (0, whole)))
        for _ in range(chance.choice((1, 1, 8, 64))):
            byte = chance.choice((0, 1, 255, chance.randrange(256)))
            image[chance.randrange(first, last)] = byte
        end = chance.choice((whole, chance.randrange(whole)))
        try:
            check_image(bytes(image[:end]), SPEC)
        except ValueError:
            refused += 1
    assert refused > 250


@posix
@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_what_is_no_file(kept, suffix, tmp_path):
    path = kept.path.with_suffix(suffix)

    def huge() -> None:
        with path.open("wb") as file:
            file.truncate(LARGEST + 1)

    for make in (
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(path),
        lambda: path.symlink_to(tmp_path / "none"),
        huge,
    ):
        path.unlink()
        make()
        assert kept.built_anew()
    assert not (tmp_path / "none").exists(), "no link is written through"
    path.unlink()
    path.mkdir()
    kept.compiled.clear()  # no file takes a folder's place: kernels stay in memory
    assert kept.get(SPEC).image == kept.image and kept.compiled == [SPEC]


@posix
@pytest.mark.parametrize("why", ["mode", "owner"])
def test_an_entry_that_others_may_write_is_built_anew(kept, why, caplog):
    if why == "owner" and os.geteuid() != 0:
        pytest.skip("needs root, to give files away")
    before = os.umask(0)
    try:
        for path in (kept.path, kept.beside):
            path.chmod(0o666) if why == "mode" else os.chown(path, 12345, 12345)
            assert kept.built_anew()
            assert path.stat().st_mode & 0o777 == 0o644 and path.stat().st_uid == os.geteuid()
        said = "other users may write to it" if why == "mode" else "another user (uid 12345)"
        assert caplog.text.count(said) == 2 and "damaged" not in caplog.text
    finally:
        os.umask(before)
