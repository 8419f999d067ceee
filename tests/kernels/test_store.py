# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparge.common.whole_file import UNFINISHED
from sparge.kernels import store as store_module
from sparge.kernels.entry import DAY, read_entry, write_entry
from sparge.kernels.source import read_sources
from sparge.kernels.spec import KernelSpec
from sparge.kernels.store import Store, entry_stem

SPEC = KernelSpec("means", "sm_90a")


@pytest.fixture
def sources(csrc):
    return read_sources("means", csrc)


def test_compiles_once_then_reads(tmp_path, sources, counting):
    cache = tmp_path / "cache"
    first = Store(cache).get(SPEC, sources, counting)
    second = Store(cache).get(SPEC, sources, counting)
    assert counting.compiled == [SPEC]
    assert second == first
    assert first.info.threads == 96
    assert sorted(p.suffix for p in cache.iterdir()) == [".cubin", ".json"]


def test_a_kernel_without_a_report_is_kept_like_any_other(tmp_path, sources, counting):
    path = tmp_path / "kernel.nvrtc13.0.cubin"
    silent = dataclasses.replace(Store(None).get(SPEC, sources, counting), report=None)
    write_entry(path, silent, SPEC)
    assert read_entry(path, SPEC) == silent


def test_the_name_tells_sources_options_and_compiler(
    sources, csrc, counting, tmp_path, monkeypatch
):
    stem = entry_stem(SPEC, sources)
    assert entry_stem(dataclasses.replace(SPEC, head_dim=64), sources) != stem
    path = Store(tmp_path).path(SPEC, sources, counting)
    assert path and path.name == f"{stem}.{counting.label}.cubin"
    (csrc / "means.cu").write_text((csrc / "means.cu").read_text() + "\n")
    assert entry_stem(SPEC, read_sources("means", csrc)) != stem
    monkeypatch.setattr("sparge.kernels.compile._OPTIONS", ("-std=c++20",))
    assert entry_stem(SPEC, sources) != stem


@pytest.mark.parametrize("why", ["blocked", "full disk", "no folder"])
def test_what_cannot_be_written_stays_in_memory(
    why, tmp_path, sources, counting, caplog, monkeypatch
):
    cache = tmp_path / "cache"
    if why == "blocked":  # a file where the folder should be: fails for root and on Windows too
        cache.write_text("")
        cache = cache / "inside"
    elif why == "full disk":
        monkeypatch.setattr(os, "replace", raising(OSError(28, "No space left on device")))
    store = Store(None if why == "no folder" else cache)
    with caplog.at_level(logging.WARNING, "sparge"):
        first = store.get(SPEC, sources, counting)
        assert store.get(SPEC, sources, counting) is first
        store.get(dataclasses.replace(SPEC, head_dim=64), sources, counting)
    assert len(counting.compiled) == 2
    if why == "blocked":
        assert [r.message.count("SPARGE_CACHE") for r in caplog.records] == [1]
    elif why == "full disk":
        assert list(cache.iterdir()) == []
    else:
        assert store.path(SPEC, sources, counting) is None


def raising(error: Exception):
    def refuse(*_, **__):
        raise error

    return refuse


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("why", ["mode", "owner"])
def test_a_folder_that_others_may_write_is_left_alone(
    why, tmp_path, sources, counting, caplog, monkeypatch
):
    cache = tmp_path / "cache"
    made = Store(cache).get(SPEC, sources, counting)
    if why == "mode":
        cache.chmod(0o777)
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    before = sorted((path.name, path.read_bytes()) for path in cache.iterdir())
    store = Store(cache)
    with caplog.at_level(logging.WARNING, "sparge"):
        first = store.get(SPEC, sources, counting)
        assert counting.compiled == [SPEC] * 2, "nothing is read from it"
        assert first == made and store.get(SPEC, sources, counting) is first
        store.get(dataclasses.replace(SPEC, head_dim=64), sources, counting)
    assert len(counting.compiled) == 3
    assert sorted((path.name, path.read_bytes()) for path in cache.iterdir()) == before
    (record,) = caplog.records
    assert str(cache) in record.message and "SPARGE_CACHE" in record.message
    assert ("chmod go-w" if why == "mode" else "another user") in record.message


def test_anew_compiles_and_keeps(tmp_path, sources, counting):
    for cache in (tmp_path / "cache", None):
        store = Store(cache)
        counting.compiled.clear()
        first = store.get(SPEC, sources, counting)
        assert store.get(SPEC, sources, counting, anew=True) == first
        assert counting.compiled == [SPEC] * 2
        assert store.find(SPEC, sources, counting) == first


OLD, RECENT = time.time() - 200 * DAY, time.time() - 20 * DAY


def test_what_nobody_needs_leaves_the_cache(tmp_path, csrc, counting):
    cache = tmp_path / "cache"
    current = Store(cache).path(SPEC, read_sources("means", csrc), counting)
    others = [KernelSpec("route", "sm_90a"), KernelSpec("means", "sm_80", 64)]
    for spec in (SPEC, *others):
        Store(cache).get(spec, read_sources(spec.entry, csrc), counting)
    needed = {path.name for path in cache.iterdir()}
    assert current is not None and len(needed) == 6

    key = "0123456789abcdef"
    old = [
        f"{spec}.{key}.{compiler}.{suffix}"
        for spec in (SPEC.id, others[0].id, "attend-sm_70-d256-int4")  # a kernel there is no more
        for compiler in ("nvrtc12.8", "nvcc13.0", counting.label)
        for suffix in ("cubin", "json")
    ]
    alone = [f"{SPEC.id}.{key[::-1]}.nvrtc12.4.cubin", f"{SPEC.id}.{key[1:]}0.nvrtc12.4.json"]
    begun = [f"{current.name}.4242-139872.tmp", f"{current.name}.0123abcd{UNFINISHED}"]
    begun += [f"{current.stem}.json.1-2.tmp", f"{current.stem}.json.9876{UNFINISHED}"]
    foreign = ["notes.json", "kernel.cubin", "notes.tmp", "film.part", "a.json.txt", f"{key}.json"]
    for name in (*old, *alone, *begun, *foreign):
        (cache / name).write_text("x")
    folder = cache / f"{SPEC.id}.{key}.nvrtc11.0.cubin"
    folder.mkdir()
    for path in cache.iterdir():
        os.utime(path, (OLD, OLD))
    fresh = [f"{SPEC.id}.{'f' * 16}.nvrtc12.8.{suffix}" for suffix in ("cubin", "json")]
    fresh += [f"{current.name}.5-5.tmp", f"{current.name}.0000{UNFINISHED}"]
    for name in fresh:
        (cache / name).write_text("x")
    for name in fresh[:2]:
        os.utime(cache / name, (RECENT, RECENT))

    Store(cache).get(SPEC, read_sources("means", csrc), counting)
    left = {path.name for path in cache.iterdir()}
    assert left == needed | set(foreign) | set(fresh) | {folder.name}


def test_what_is_used_is_never_old(tmp_path, csrc, counting):
    """Another installation may use it, say, whose sources are not these."""
    cache, others = tmp_path / "cache", tmp_path / "others"
    shutil.copytree(csrc, others)
    (others / "means.cu").write_text((csrc / "means.cu").read_text() + "// older\n")
    for folder in (others, csrc):
        Store(cache).get(SPEC, read_sources("means", folder), counting)
    for path in cache.iterdir():
        os.utime(path, (OLD, OLD))
    Store(cache).find(SPEC, read_sources("means", others), counting)
    counting.compiled.clear()
    for folder in (csrc, others):
        Store(cache).get(SPEC, read_sources("means", folder), counting)
    assert counting.compiled == []
    for path in cache.iterdir():
        os.utime(path, (OLD, OLD))
    Store(cache).get(SPEC, read_sources("means", csrc), counting)
    assert len(list(cache.iterdir())) == 2, "nobody uses the other one any more"


def test_a_cache_that_cannot_be_tidied_is_no_failure(tmp_path, sources, counting, monkeypatch):
    cache = tmp_path / "cache"
    made = Store(cache).get(SPEC, sources, counting)
    stale = cache / f"{SPEC.id}.0123456789abcdef.nvrtc12.8.cubin"
    stale.write_text("x")
    os.utime(stale, (OLD, OLD))

    monkeypatch.setattr(Path, "unlink", raising(PermissionError(13, "in use")))
    assert Store(cache).get(SPEC, sources, counting) == made and stale.exists()


def test_replace_refused_by_windows_is_no_failure_when_the_file_is_the_same(
    tmp_path, sources, counting, monkeypatch
):
    cache = tmp_path / "cache"
    cubin = Store(cache).get(SPEC, sources, counting)
    monkeypatch.setattr(os, "replace", raising(PermissionError(13, "in use")))
    path = Store(cache).path(SPEC, sources, counting)
    assert path
    write_entry(path, cubin, SPEC)
    with pytest.raises(PermissionError):
        write_entry(path, dataclasses.replace(cubin, image=cubin.image + b"other"), SPEC)
    assert not list(cache.glob(f"*{UNFINISHED}"))


def test_prebuilt_comes_first_and_is_verified(tmp_path, sources, counting):
    prebuilt = tmp_path / "prebuilt"
    made = Store(prebuilt).get(SPEC, sources, counting)
    store = Store(tmp_path / "cache", prebuilt)
    assert store.get(SPEC, sources, counting) == made
    assert len(counting.compiled) == 1
    assert not (tmp_path / "cache").exists()
    for path in prebuilt.glob("*.cubin"):
        path.write_bytes(b"damaged")
    assert store.get(SPEC, sources, counting) == made
    assert len(counting.compiled) == 2


@pytest.mark.parametrize(("made_with", "used"), [("nvrtc12.8", True), ("nvrtc99.0", False)])
def test_prebuilt_of_a_newer_cuda_is_left_alone(made_with, used, tmp_path, sources, counting):
    prebuilt, here = tmp_path / "prebuilt", counting.label
    counting.label = made_with
    Store(prebuilt).get(SPEC, sources, counting)
    counting.label = here
    found = Store(None, prebuilt).find(SPEC, sources, counting)
    assert (found is not None) == used


_RACER = """
import sys
from pathlib import Path
from sparge.kernels import nvrtc
from sparge.kernels.compile import NvrtcCompiler
from sparge.kernels.source import read_sources
from sparge.kernels.spec import KernelSpec
from sparge.kernels.store import Store
csrc, cache = map(Path, sys.argv[1:])
compiler, sources = NvrtcCompiler(nvrtc.load()), read_sources("means", csrc)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    store = Store(cache)
    for head_dim in (64, 128):
        spec = KernelSpec("means", "sm_90a", head_dim)
        assert store.get(spec, sources, compiler).info.threads == 96
        path = store.path(spec, sources, compiler)
        path.unlink(missing_ok=True)  # so that the other process reads, writes and finds gaps too
"""


def test_two_processes_at_once(csrc, tmp_path):
    root, cache = Path(store_module.__file__).parents[2], tmp_path / "cache"
    command = [sys.executable, "-c", _RACER, str(csrc), str(cache)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    racers = [subprocess.Popen(command, **pipes, text=True, cwd=root) for _ in range(2)]
    for racer in racers:
        assert racer.stdout and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        _, errors = racer.communicate(timeout=120)
        assert racer.returncode == 0, errors
        assert "damaged" not in errors
    assert not list(cache.glob(f"*{UNFINISHED}"))
