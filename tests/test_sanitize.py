# SPDX-License-Identifier: Apache-2.0
"""The runner of compute-sanitizer: every GPU test once a tool, and only a clean log is clean."""

from __future__ import annotations

import importlib.util
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    path = Path(__file__).parent / "gpu" / "sanitize.py"
    spec = importlib.util.spec_from_file_location("sanitize", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_each_test_runs_once_for_each_tool(sanitize: ModuleType) -> None:
    tests = [f"tests/gpu/test_x.py::test_{n}" for n in range(20)] + ["a::test_cuda_graph"]
    found = list(sanitize.groups(tests, sanitize.TOOLS, [2, 5]))
    for tool in sanitize.TOOLS:
        of_tool = [test for group in found if group.tool == tool for test in group.tests]
        assert sorted(of_tool) == sorted(tests)
    assert {group.gpu for group in found} == {2, 5}
    for group in found:
        cached = group.tool in ("racecheck", "synccheck") or group.tests == ("a::test_cuda_graph",)
        assert ("PYTORCH_NO_CUDA_MEMORY_CACHING" in group.environment()) != cached


def test_our_kernels_alone_are_watched_but_by_initcheck(sanitize: ModuleType) -> None:
    """initcheck would take what torch's kernels write for not written."""
    kernels = {path.stem for path in (Path(__file__).parent.parent / "csrc").glob("*.cu")}
    for tool in sanitize.TOOLS:
        command = sanitize.Group(0, tool, 0, ("a::test_b",)).command("some/sanitizer")
        assert command[:3] == ["some/sanitizer", "--tool", tool] and command[-1] == "a::test_b"
        words = [command[at + 1] for at, word in enumerate(command) if word == "--kernel-name"]
        watched = {k for k in kernels if any(word.removeprefix("kns=") in k for word in words)}
        assert watched == (set() if tool == "initcheck" else kernels)


@pytest.mark.parametrize(
    ("status", "log", "clean"),
    [
        (0, "6 passed in 3 s\n== RACECHECK SUMMARY: 0 hazards displayed (0 errors)", True),
        (0, "6 passed in 3 s\n== ERROR SUMMARY: 0 errors", True),
        (0, "5 passed, 1 skipped in 3 s\n== ERROR SUMMARY: 0 errors", False),
        (77, "6 passed in 3 s\n== ERROR SUMMARY: 0 errors", False),
        (0, "6 passed in 3 s\n== ERROR SUMMARY: 2 errors", False),
        (0, "6 passed in 3 s\n== RACECHECK SUMMARY: 10 hazards displayed (10 errors)", False),
        (0, "6 skipped in 3 s\n== ERROR SUMMARY: 0 errors", False),
        (0, "6 passed in 3 s\n== Internal Sanitizer Error", False),
    ],
)
def test_what_is_clean(sanitize: ModuleType, status: int, log: str, clean: bool) -> None:
    for tool in sanitize.TOOLS:
        assert sanitize.is_clean(tool, status, log, tests=6) == clean


COPIES = """6 passed in 3 s
========= Host API memory access error at host access to 0x7f0 of size 512 bytes
=========     Uninitialized access to 0x7f4 on access by cudaMemcpy source
"""
SECOND = "=========     Uninitialized access"
READS = """========= Uninitialized __global__ memory read of size 8 bytes
=========     at route+0x150
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f0
=========
"""
CLONES = READS.replace("route", "void at::native::elementwise_kernel<4, at::native::Copy>")


@pytest.mark.parametrize(
    ("status", "log", "clean"),
    [
        (77, f"{COPIES}========= ERROR SUMMARY: 1 error", True),
        (77, f"{COPIES}{COPIES}========= ERROR SUMMARY: 2 errors", True),
        (77, f"{COPIES.replace(SECOND, f'.{SECOND}')}========= ERROR SUMMARY: 1 error", True),
        (77, f"{COPIES}{CLONES}========= ERROR SUMMARY: 2 errors", True),
        (77, f"{COPIES}{READS}========= ERROR SUMMARY: 2 errors", False),
        (77, f"{CLONES}{READS}========= ERROR SUMMARY: 2 errors", False),
        (77, f"{COPIES}========= ERROR SUMMARY: 2 errors", False),
        (1, f"{COPIES}========= ERROR SUMMARY: 1 error", False),
    ],
)
def test_initcheck_forgives_copies_by_the_host_and_other_kernels(
    sanitize: ModuleType, status: int, log: str, clean: bool
) -> None:
    assert sanitize.is_clean("initcheck", status, log, tests=6) == clean
    assert not sanitize.is_clean("memcheck", status, log, tests=6)


@pytest.mark.parametrize(("summary", "status"), [("0 errors", 0), ("1 errors", 1)])
def test_the_exit_status_says_whether_all_was_clean(
    sanitize: ModuleType, tmp_path: Path, monkeypatch, capsys, summary: str, status: int
) -> None:
    fake = tmp_path / "sanitizer"
    count = "for word; do case $word in *::*) n=$((n+1));; esac; done"
    fake.write_text(f"#!/bin/sh\n{count}\necho $n passed\necho ERROR SUMMARY: {summary}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(sanitize, "collected", lambda _: [f"a::test_{n}" for n in range(9)])
    options = ["--sanitizer", str(fake), "--logs", str(tmp_path / "logs"), "--workers", "2"]
    assert sanitize.main(options) == status
    said = capsys.readouterr().out
    for tool in sanitize.TOOLS:
        assert f"{tool}: {0 if status else 9} of 9 tests clean" in said
    assert ("NOT CLEAN" in said) == bool(status)


def test_tests_of_the_gpu_are_collected(sanitize: ModuleType) -> None:
    found = sanitize.collected("test_order_kinds")
    assert found and all("gpu/test_order_kinds.py::" in test for test in found)


def test_what_was_found_is_shown_and_copies_by_the_host_are_not(sanitize: ModuleType) -> None:
    log = f"collected 6 items\n{COPIES}{READS}E   assert 1 == 2\n{COPIES}"
    shown = "\n".join(sanitize.findings(log))
    assert "memory read of size 8" in shown and "route+0x150" in shown and "assert 1 == 2" in shown
    assert "Host API" not in shown and "cudaMemcpy" not in shown
    assert len(sanitize.findings(READS * 100)) == sanitize.SHOWN
    beside = "\n".join(sanitize.findings(CLONES * 100 + READS + CLONES))
    assert "route+0x150" in beside and "elementwise" not in beside
