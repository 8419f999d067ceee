# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sparge.kernels import source
from sparge.kernels.source import find_csrc, read_sources


def test_closure_has_every_header_once_and_a_missing_one_names_its_reader(csrc: Path):
    (csrc / "deep").mkdir()
    (csrc / "deep" / "a.cuh").write_text('#include "../common/twice.cuh"\n#include "b.cuh"\n')
    (csrc / "deep" / "b.cuh").write_text('#  include "common/twice.cuh"\n')
    (csrc / "route.cu").write_text('#include "deep/a.cuh"\n#include <toolkit.h>\nint x;\n')
    sources = read_sources("route", csrc)
    assert list(sources.headers) == ["common/twice.cuh", "deep/a.cuh", "deep/b.cuh"]
    assert sources.headers["deep/a.cuh"] == '#include "common/twice.cuh"\n#include "deep/b.cuh"\n'
    assert "<toolkit.h>" in sources.text
    (csrc / "deep" / "b.cuh").write_text('#include "a.cuh"\n')
    assert len(read_sources("route", csrc).headers) == 3, "a cycle ends"
    (csrc / "common" / "twice.cuh").unlink()
    with pytest.raises(FileNotFoundError, match=r"twice\.cuh, which \S+ asks for"):
        read_sources("route", csrc)
    with pytest.raises(FileNotFoundError, match=r"no nothing\.cu"):
        read_sources("nothing", csrc)


def test_hash_ignores_place_line_endings_and_strangers(csrc: Path, tmp_path: Path):
    before = read_sources("route", csrc).hash
    elsewhere = Path(shutil.copytree(csrc, tmp_path / "other place"))
    for path in elsewhere.rglob("*.cu*"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (elsewhere / "common" / "unused.cuh").write_text("")
    assert read_sources("route", elsewhere).hash == before
    header = csrc / "common" / "twice.cuh"
    header.write_text(header.read_text() + "// more\n")
    assert read_sources("route", csrc).hash != before


@pytest.mark.parametrize("inside", [True, False], ids=["site-packages", "pack"])
def test_csrc_is_found_in_both_layouts(inside: bool, tmp_path: Path, monkeypatch):
    library = tmp_path / "sparge"
    expected = (library if inside else tmp_path) / "csrc"
    (tmp_path / "csrc").mkdir()  # when inside: a stranger's folder in site-packages
    expected.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(source, "__file__", str(library / "kernels" / "source.py"))
    assert find_csrc() == expected.resolve()
    for folder in {expected, tmp_path / "csrc"}:
        folder.rmdir()
    with pytest.raises(FileNotFoundError, match="Reinstall"):
        find_csrc()
