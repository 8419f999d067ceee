# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sparge.kernels import build as build_module
from sparge.kernels import graph
from sparge.kernels.spec import KernelSpec, all_specs, native_specs

SPECS = (KernelSpec("means", "sm_90a"), KernelSpec("route", "sm_90a"))
MEANS, ROUTE = (spec.id for spec in SPECS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPARGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def job(csrc, tmp_path, compiler) -> graph.Job:
    return graph.Job(SPECS, csrc, tmp_path / "out put", compiler)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_missing_is_built_and_what_fails_fails_alone(
    job, csrc, capfd, monkeypatch, tmp_path
):
    """Kernels are built by the ninja of this environment alone."""

    def edges() -> list[str]:
        """Kernels that ninja ran an edge for."""
        lines = capfd.readouterr().out.splitlines()
        return sorted(line.split("] ")[1] for line in lines if line.startswith("["))

    decoy = tmp_path / "ninja"
    decoy.write_text("#!/bin/sh\n")
    decoy.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    built = build_module.build(job, 2)
    assert all(built.values()) and edges() == [MEANS, ROUTE]
    made = contents(job.out)
    assert build_module.build(job, 2) == built and edges() == []
    means, route = (next(job.out.glob(f"{name}.*.cubin")) for name in (MEANS, ROUTE))
    means.unlink()
    route.write_bytes(b"damaged")
    assert build_module.build(job, 2) == built and edges() == [MEANS, ROUTE]
    assert contents(job.out) == made
    (csrc / "route.cu").write_text("#error broken here\n")
    built = build_module.build(job, 2)
    assert [cubin is None for cubin in built.values()] == [False, True]
    assert "broken here" in capfd.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_folder_that_others_may_write_is_not_built_into(job, csrc, capsys):
    job.out.mkdir()
    job.out.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod go-w"):
        build_module.build(job, 2)
    arguments = ["--arch", "sm_80", "--csrc", str(csrc), "--out", str(job.out)]
    assert build_module.main(arguments) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert list(job.out.iterdir()) == []


def test_prepare_fills_the_users_cache(csrc, compiler, own_cache, monkeypatch):
    monkeypatch.setattr(build_module, "find_csrc", lambda: csrc)
    monkeypatch.setattr(build_module, "_compiler", lambda library: compiler)
    wanted = native_specs("sm_89")[:2]
    monkeypatch.setattr(build_module, "native_specs", lambda arch: wanted)
    built = build_module.prepare("sm_89")
    assert set(built) == set(wanted) and all(built.values())
    assert len(list(own_cache.glob("*.cubin"))) == len(built)
    monkeypatch.setattr(build_module, "cache_folder", lambda: None)
    with pytest.raises(OSError, match="SPARGE_CACHE"):
        build_module.prepare("sm_89")


def test_an_edge_needs_no_torch(job, compiler):
    """Importing torch takes seconds, once for every kernel."""
    program = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    edge = Path(graph.__file__).with_name("edge.py")
    folders = ["--csrc", job.csrc, "--out", job.out, "--nvrtc", compiler.nvrtc.path]
    command = [sys.executable, "-c", program, edge, MEANS, *folders]
    subprocess.run(list(map(str, command)), check=True)
    assert len(list(job.out.glob("*.cubin"))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems have no such names")
def test_ninja_takes_paths_that_are_no_text(job, tmp_path):
    job = replace(job, out=tmp_path / os.fsdecode(b"caf\xe9"))
    assert all(build_module.build(job, 2).values())


def test_command_line(csrc, tmp_path, capfd, monkeypatch):
    specs, out = all_specs("sm_80")[:2], tmp_path / "out"
    monkeypatch.setattr(build_module, "all_specs", lambda arch: specs)
    arguments = ["--arch", "sm_80", "--csrc", str(csrc), "--out", str(out), "--jobs", "2"]
    assert build_module.main(arguments) == 0
    assert f"{len(specs)} kernels in {out}" in capfd.readouterr().out
    (csrc / f"{specs[0].entry}.cu").write_text("#error broken here\n")
    assert build_module.main(arguments) == 1
    assert "broken here" in capfd.readouterr().out
    arguments[arguments.index(str(csrc))] = str(tmp_path / "absent")
    assert build_module.main(arguments) == 1
    assert "csrc has no" in capfd.readouterr().err
