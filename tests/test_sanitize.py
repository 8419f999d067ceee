# SPDX-License-Identifier: Apache-2.0
"""The runner of compute-sanitizer: every GPU test once a tool, and only a clean log is clean."""

from __future__ import annotations

import importlib.util
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest

COPIES = """6 passed in 3 s
========= Host API memory access error at host access to 0x7f0 of size 512 bytes
=========     Uninitialized access to 0x7f4 on access by cudaMemcpy source
"""
READS = """========= Uninitialized __global__ memory read of size 8 bytes
=========     at route+0x150
=========     by thread (0,0,0) in block (0,0,0)
=========
"""
CLONES = READS.replace("route", "void at::native::elementwise_kernel<4, at::native::Copy>")


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    path = Path(__file__).parent / "gpu" / "sanitize.py"
    spec = importlib.util.spec_from_file_location("sanitize", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("status", "log", "clean", "of_initcheck"),
    [
        (0, "6 passed in 3 s\n== RACECHECK SUMMARY: 0 hazards displayed (0 errors)", True, True),
        (0, "6 passed in 3 s\n== ERROR SUMMARY: 0 errors", True, True),
        (0, "5 passed, 1 skipped in 3 s\n== ERROR SUMMARY: 0 errors", False, False),
        (77, "6 passed in 3 s\n== ERROR SUMMARY: 0 errors", False, False),
        (0, "6 passed in 3 s\n== ERROR SUMMARY: 2 errors", False, False),
        (0, "6 passed in 3 s\n== Internal Sanitizer Error", False, False),
        # It forgives copies by the host, and kernels of others.
        (77, f"{COPIES}{CLONES}========= ERROR SUMMARY: 2 errors", False, True),
        (77, f"{COPIES}{READS}========= ERROR SUMMARY: 2 errors", False, False),
        (77, f"{COPIES}========= ERROR SUMMARY: 2 errors", False, False),
        (1, f"{COPIES}========= ERROR SUMMARY: 1 error", False, False),
    ],
)
def test_what_is_clean(sanitize, status: int, log: str, clean: bool, of_initcheck: bool) -> None:
    for tool in sanitize.TOOLS:
        expected = of_initcheck if tool == "initcheck" else clean
        assert sanitize.is_clean(tool, status, log, tests=6) == expected, tool
    shown = "\n".join(sanitize.findings(f"{COPIES}{CLONES * 100}{READS}E   assert 1 == 2\n"))
    assert "route+0x150" in shown and "assert 1 == 2" in shown
    assert "cudaMemcpy" not in shown and "elementwise" not in shown, "findings are of our kernels"


@pytest.mark.parametrize(("summary", "status"), [("0 errors", 0), ("1 errors", 1)])
def test_each_test_runs_once_a_tool_and_the_status_says_whether_all_was_clean(
    sanitize: ModuleType, tmp_path: Path, monkeypatch, capsys, summary: str, status: int
) -> None:
    fake = tmp_path / "sanitizer"
    count = "for word; do case $word in *::*) n=$((n+1));; esac; done"
    fake.write_text(f"#!/bin/sh\n{count}\necho $n passed\necho ERROR SUMMARY: {summary}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    tests = [f"a::test_{n}" for n in range(9)] + ["a::test_cuda_graph"]
    monkeypatch.setattr(sanitize, "collected", lambda _: tests)
    options = ["--sanitizer", str(fake), "--logs", str(tmp_path / "logs"), "--workers", "2"]
    assert sanitize.main(options) == status
    said = capsys.readouterr().out
    for tool in sanitize.TOOLS:
        assert f"{tool}: {0 if status else 10} of 10 tests clean" in said
    assert ("NOT CLEAN" in said) == bool(status)
