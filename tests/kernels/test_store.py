# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparge.kernels.cubin import read_launch_info
from sparge.kernels.folder import UNFINISHED, cache_folder
from sparge.kernels.source import read_sources
from sparge.kernels.spec import KernelSpec
from sparge.kernels.store import Store, entry_stem, read_entry, write_entry

SPEC = KernelSpec("means", "sm_90a")
SMALL = dataclasses.replace(SPEC, head_dim=64)


@pytest.fixture
def sources(csrc):
    return read_sources("means", csrc)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def contents(folder):
    return sorted((path.name, path.read_bytes()) for path in folder.iterdir())


def test_compiles_once_then_reads(cache, sources, counting):
    first = Store(cache).get(SPEC, sources, counting)
    assert Store(cache).get(SPEC, sources, counting) == first and counting.compiled == [SPEC]
    assert sorted(p.suffix for p in cache.iterdir()) == [".cubin", ".json"]
    silent = dataclasses.replace(first, log="")
    path = cache / "kernel.nvrtc13.0.cubin"
    write_entry(path, silent, SPEC)
    assert read_entry(path, SPEC) == silent, "without words it is kept like any other"


def test_the_name_tells_sources_options_and_compiler(sources, csrc, counting, cache, monkeypatch):
    stem = entry_stem(SPEC, sources)
    assert entry_stem(SMALL, sources) != stem
    path = Store(cache).path(SPEC, sources, counting)
    assert path and path.name == f"{stem}.{counting.label}.cubin"
    (csrc / "means.cu").write_text((csrc / "means.cu").read_text() + "\n")
    assert entry_stem(SPEC, read_sources("means", csrc)) != stem
    monkeypatch.setattr("sparge.kernels.nvrtc._OPTIONS", ("-std=c++20",))
    assert entry_stem(SPEC, sources) != stem


posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("no folder", "this user has no home folder."),
        ("no such home", "SPARGE_CACHE is ~nobody-here/kernels, and there is no such home."),
        ("blocked", "to a folder that takes them"),
        ("full disk", "No space"),
        pytest.param("mode", "chmod go-w", marks=posix),
        pytest.param("owner", "another user", marks=posix),
    ],
)
def test_what_cannot_be_kept_stays_in_memory(
    why, said, cache, sources, counting, caplog, monkeypatch, raising
):
    """Said once; nothing is read from a folder that others may write, nor written there."""
    before = []
    monkeypatch.delenv("SPARGE_CACHE", raising=False)
    if why == "no such home":
        monkeypatch.setenv("SPARGE_CACHE", "~nobody-here/kernels")
        assert cache_folder() is None
    if why == "blocked":  # a file where the folder should be: fails for root and on Windows too
        cache.write_text("")
        cache = cache / "inside"
    elif why == "full disk":
        monkeypatch.setattr(os, "replace", raising(OSError(28, "No space left on device")))
    elif why in ("mode", "owner"):
        Store(cache).get(SPEC, sources, counting)
        before = contents(cache)
        counting.compiled.clear()
        if why == "mode":
            cache.chmod(0o777)
        else:
            owner = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    store = Store(None if why.startswith("no ") else cache)
    with caplog.at_level(logging.WARNING, "sparge"):
        first = store.get(SPEC, sources, counting)
        assert store.get(SPEC, sources, counting) is first
        store.get(SMALL, sources, counting)
    assert counting.compiled == [SPEC, SMALL]
    (record,) = caplog.records
    assert said in record.message and "SPARGE_CACHE" in record.message
    assert not cache.is_dir() or contents(cache) == before


def test_files_that_windows_holds_are_no_failure(cache, sources, counting, monkeypatch, raising):
    made = Store(cache).get(SPEC, sources, counting)
    (path,) = cache.glob("*.cubin")
    in_use = raising(PermissionError(13, "in use"))
    monkeypatch.setattr(os, "replace", in_use)
    write_entry(path, made, SPEC)
    with pytest.raises(PermissionError):
        write_entry(path, dataclasses.replace(made, image=made.image + b"other"), SPEC)
    assert not list(cache.glob(f"*{UNFINISHED}"))


def test_two_writers_at_once(cache, sources, counting, caplog):
    def work(_: int) -> None:
        for _ in range(5):
            store = Store(cache)
            for spec in (SPEC, SMALL):
                image = store.get(spec, sources, counting).image
                assert read_launch_info(image).threads == 96
                path = store.path(spec, sources, counting)
                assert path  # goes, so that the other one reads, writes and finds gaps too
                path.unlink(missing_ok=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert "is not used" not in caplog.text and not list(cache.glob(f"*{UNFINISHED}"))
