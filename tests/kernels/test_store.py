# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparge.kernels import store as store_module
from sparge.kernels.entry import read_entry, write_entry
from sparge.kernels.source import read_sources
from sparge.kernels.spec import KernelSpec
from sparge.kernels.store import Store, entry_stem
from sparge.whole_file import UNFINISHED

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


def test_the_name_tells_sources_options_and_compiler(sources, csrc, counting, tmp_path):
    stem = entry_stem(SPEC, sources)
    assert entry_stem(dataclasses.replace(SPEC, head_dim=64), sources) != stem
    (csrc / "means.cu").write_text((csrc / "means.cu").read_text() + "\n")
    assert entry_stem(SPEC, read_sources("means", csrc)) != stem
    path = Store(tmp_path).path(SPEC, sources, counting)
    assert path and path.name == f"{stem}.{counting.label}.cubin"


def test_options_change_the_name(sources, monkeypatch):
    stem = entry_stem(SPEC, sources)
    monkeypatch.setattr("sparge.kernels.compile._OPTIONS", ("-std=c++20",))
    assert entry_stem(SPEC, sources) != stem


@pytest.mark.parametrize(
    "damage", ["flip", "cut", "empty", "no report", "bad report", "old report"]
)
def test_damage_is_noticed_and_repaired(damage, tmp_path, sources, counting):
    store = Store(tmp_path / "cache")
    good = store.get(SPEC, sources, counting)
    path = store.path(SPEC, sources, counting)
    assert path
    report = path.with_suffix(".json")
    image = bytearray(path.read_bytes())
    if damage == "flip":
        image[len(image) // 2] ^= 1
        path.write_bytes(image)
    elif damage == "cut":
        path.write_bytes(image[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "no report":
        report.unlink()
    elif damage == "bad report":
        report.write_text("[]")
    else:
        report.write_text(report.read_text().replace("registers", "registrars"))
    assert Store(tmp_path / "cache").find(SPEC, sources, counting) is None
    assert Store(tmp_path / "cache").get(SPEC, sources, counting) == good
    assert read_entry(path, SPEC) == good
    assert len(counting.compiled) == 2


def test_a_folder_that_cannot_be_written_keeps_kernels_in_memory(
    tmp_path, sources, counting, caplog
):
    blocked = tmp_path / "file"
    blocked.write_text("")  # a file where the folder should be: fails for root and on Windows too
    store = Store(blocked / "cache")
    with caplog.at_level(logging.WARNING, "sparge"):
        first = store.get(SPEC, sources, counting)
        assert store.get(SPEC, sources, counting) is first
        store.get(dataclasses.replace(SPEC, head_dim=64), sources, counting)
    assert len(counting.compiled) == 2
    assert [r.message.count("SPARGE_CACHE") for r in caplog.records] == [1]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="this user may write anywhere")
def test_a_read_only_folder_keeps_kernels_in_memory(tmp_path, sources, counting):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o500)
    store = Store(cache)
    assert store.get(SPEC, sources, counting) is store.get(SPEC, sources, counting)


def test_a_full_disk_keeps_kernels_in_memory_and_leaves_nothing(
    tmp_path, sources, counting, monkeypatch
):
    def full(source, target):
        assert Path(source).stat().st_size > 0
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    store = Store(tmp_path / "cache")
    assert store.get(SPEC, sources, counting) is store.get(SPEC, sources, counting)
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_cache_folder_at_all(sources, counting):
    store = Store(None)
    assert store.get(SPEC, sources, counting) is store.get(SPEC, sources, counting)
    assert store.path(SPEC, sources, counting) is None


def test_replace_refused_by_windows_is_no_failure_when_the_file_is_the_same(
    tmp_path, sources, counting, monkeypatch
):
    cache = tmp_path / "cache"
    cubin = Store(cache).get(SPEC, sources, counting)

    def refused(source, target):
        raise PermissionError(13, "in use")

    monkeypatch.setattr(os, "replace", refused)
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
assert not any("damaged" in line for line in sys.argv)
"""


def test_two_processes_at_once(csrc, tmp_path, counting):
    root = Path(store_module.__file__).parents[2]
    cache = tmp_path / "cache"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(csrc), str(cache)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=root,
        )
        for _ in range(2)
    ]  # fmt: skip
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
    shutil.rmtree(cache)
