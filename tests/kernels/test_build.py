# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparge.kernels import build as build_module
from sparge.kernels import graph
from sparge.kernels.folder import is_private
from sparge.kernels.spec import KernelSpec, all_specs, native_specs

SPECS = (KernelSpec("means", "sm_90a"), KernelSpec("route", "sm_90a"))
MEANS, ROUTE = (spec.id for spec in SPECS)
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SPARGE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def job(csrc, tmp_path, compiler) -> graph.Job:
    return graph.Job(SPECS, csrc, tmp_path / "out put", compiler)


@pytest.fixture
def ninja() -> Path:
    program = graph.ninja_program()
    assert program is not None, "install requirements-dev.txt"
    return program


def test_ninja_builds_only_what_changed(job, ninja, csrc, capfd):
    def edges() -> list[str]:
        """Kernels that ninja ran an edge for."""
        lines = capfd.readouterr().out.splitlines()
        return sorted(line.split("] ")[1] for line in lines if line.startswith("["))

    def times(which: str) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in job.out.glob(which)}

    assert all(build_module.build(job, 2).values()) and edges() == [MEANS, ROUTE]
    assert graph.run_ninja(ninja, job, 2) and edges() == []
    before = times("means*")
    for file, expected in (("route.cu", [ROUTE]), ("common/twice.cuh", [MEANS, ROUTE])):
        with open(csrc / file, "a") as text:
            text.write("// changed\n")
        assert all(build_module.build(job, 2).values()) and edges() == expected
        assert MEANS in expected or before == times("means*")
    before = times("*")
    time.sleep(0.02)  # file systems may count in coarse steps
    os.utime(csrc / "means.cu")
    for expected in ([MEANS], []):
        assert graph.run_ninja(ninja, job, 2) and edges() == expected
    assert before == times("*")


@posix
def test_a_folder_that_others_may_write_is_not_built_into(job, csrc, capsys):
    job.out.mkdir()
    job.out.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod go-w"):
        build_module.build(job, 2)
    arguments = ["--arch", "sm_80", "--csrc", str(csrc), "--out", str(job.out)]
    assert build_module.main(arguments) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert list(job.out.iterdir()) == []


def test_prepare_fills_the_users_cache_with_what_no_release_ships(
    csrc, tmp_path, compiler, monkeypatch
):
    monkeypatch.setattr(build_module, "find_csrc", lambda: csrc)
    monkeypatch.setattr(build_module, "prebuilt_folder", lambda: tmp_path / "prebuilt")
    monkeypatch.setattr(build_module, "_compiler", lambda name, library: compiler)
    shipped = KernelSpec("route", "sm_89")
    build_module.build(graph.Job((shipped,), csrc, tmp_path / "prebuilt", compiler), 1)
    wanted = [shipped, *native_specs("sm_89")[:2]]
    monkeypatch.setattr(build_module, "native_specs", lambda arch: wanted)
    built = build_module.prepare("sm_89")
    assert set(built) == set(wanted) - {shipped} and all(built.values())
    assert len(list((tmp_path / "cache").glob("*.cubin"))) == len(built)
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
    arguments = [edge, MEANS, "--csrc", job.csrc, "--out", job.out]
    arguments += ["--nvrtc", compiler.nvrtc.path]
    subprocess.run([sys.executable, "-c", program, *map(str, arguments)], check=True)
    assert len(list(job.out.glob("*.cubin"))) == 1


@pytest.fixture
def ran(monkeypatch) -> list[Path]:
    """The folders that ninja was started in, checked then; it does nothing."""
    folders: list[Path] = []

    def run(command: list[str]) -> subprocess.CompletedProcess:
        folder = Path(command[command.index("-C") + 1])
        written = folder / "build.ninja"
        assert not written.is_symlink() and is_private(folder)
        assert written.stat().st_mode & 0o022 == 0
        folders.append(folder)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(graph.subprocess, "run", run)
    return folders


@posix
def test_ninja_runs_nothing_that_others_may_write(job, ninja, ran, tmp_path, monkeypatch):
    """Nor writes through a link. Folders are looked at from the folder of the graph upwards."""
    assert graph.run_ninja(ninja, job, 2)
    (usual,) = ran
    assert (tmp_path / "cache") in usual.parents

    def runs_elsewhere() -> bool:
        assert graph.run_ninja(ninja, job, 2)
        return ran[-1] != usual and not ran[-1].exists()  # of this run alone

    theirs = tmp_path / "theirs"
    theirs.write_text("untouched")
    for name, kind in (("build.ninja", os.symlink), (".ninja_log", os.link)):
        (usual / name).unlink(missing_ok=True)
        kind(theirs, usual / name)
        assert runs_elsewhere() and theirs.read_text() == "untouched"
        (usual / name).unlink()
    assert graph.run_ninja(ninja, job, 2) and ran[-1] == usual
    for folder in (usual, usual.parent, tmp_path / "cache", tmp_path):
        before = folder.stat().st_mode
        folder.chmod(0o777)
        assert runs_elsewhere()
        folder.chmod(before)
    usual.rename(tmp_path / "elsewhere")
    usual.symlink_to(tmp_path / "elsewhere")
    assert runs_elsewhere() and ran[-1] != tmp_path / "elsewhere"
    monkeypatch.setattr(graph, "cache_folder", lambda: None)
    assert runs_elsewhere() and list(job.out.parent.glob("out*/**/build.ninja")) == []


@pytest.mark.parametrize("with_ninja", [True, False])
def test_damaged_missing_and_broken_kernels(job, csrc, capfd, monkeypatch, tmp_path, with_ninja):
    """Ninja, of this environment alone, and this process make the same files."""
    decoy = tmp_path / "ninja"
    decoy.write_text("#!/bin/sh\n")
    decoy.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    built = build_module.build(job, 2)
    made = {path.name: path.read_bytes() for path in job.out.iterdir()}
    if not with_ninja:
        monkeypatch.setitem(sys.modules, "ninja", None)
        assert graph.ninja_program() is None
        job = graph.Job(job.specs, job.csrc, tmp_path / "other", job.compiler)
        assert build_module.build(job, 2) == built
    means, route = (next(job.out.glob(f"{name}.*.cubin")) for name in (MEANS, ROUTE))
    means.unlink()
    route.write_bytes(b"damaged")
    assert build_module.build(job, 2) == built
    assert {path.name: path.read_bytes() for path in job.out.iterdir()} == made
    (csrc / "route.cu").write_text("#error broken here\n")
    built = build_module.build(job, 2)
    assert [cubin is None for cubin in built.values()] == [False, True], "it fails alone"
    assert "broken here" in capfd.readouterr().out and "failed" in build_module.table(built)


@posix
@pytest.mark.parametrize("name", ["a|b", "two\nlines"])
def test_paths_that_ninja_has_no_words_for(name, csrc, tmp_path, compiler, monkeypatch):
    monkeypatch.setattr(build_module, "run_ninja", lambda *_: pytest.fail("ninja ran"))
    job = graph.Job(SPECS[:1], csrc, tmp_path / name, compiler)
    assert all(build_module.build(job, 1).values())


def test_command_line(csrc, tmp_path, capfd, monkeypatch):
    specs, out = all_specs("sm_80")[:2], tmp_path / "out"
    monkeypatch.setattr(build_module, "all_specs", lambda arch: specs)
    arguments = ["--arch", "sm_80", "--csrc", str(csrc), "--out", str(out), "--jobs", "2"]
    assert build_module.main(arguments) == 0
    text = capfd.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    for spec in specs:
        threads, registers, shared, stack, spills, _ = map(int, rows[spec.id])
        assert (threads, shared, stack, spills) == (96, 4096, 0, 0) and registers > 0
    assert f"{len(specs)} kernels in {out}" in text

    stranger = out / "means-sm_90a-d128.0123.nvrtc13.0.cubin"
    stranger.write_text("another arch's")
    with open(csrc / "common" / "twice.cuh", "a") as file:
        file.write("// changed\n")
    assert build_module.main(arguments) == 0 and stranger.is_file()
    assert len(list(out.iterdir())) == 2 * len(specs) + 1, "old ones are gone"

    (csrc / f"{specs[0].entry}.cu").write_text("#error broken here\n")
    assert build_module.main(arguments) == 1
    assert "broken here" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        build_module.main(["--arch", "sm_80", "--with", "nvcc"])
    assert "--out" in capfd.readouterr().err
    arguments[arguments.index(str(csrc))] = str(tmp_path / "absent")
    assert build_module.main(arguments) == 1
    assert "csrc has no" in capfd.readouterr().err
