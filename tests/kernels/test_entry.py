# SPDX-License-Identifier: Apache-2.0
"""Entries that are not what their name says are built anew, and nothing else happens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
        kept.get(other)
        path = Store(kept.path.parent).path(other, read_sources(other.entry, csrc), counting)
        assert path is not None
        kept.path.write_bytes(path.read_bytes())
        kept.beside.write_bytes(path.with_suffix(".json").read_bytes())
        assert kept.built_anew(), "both files of another entry"


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
