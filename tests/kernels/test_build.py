# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparge.kernels import build as build_module
from sparge.kernels.spec import KernelSpec, all_specs

SPECS = (KernelSpec("means", "sm_90a"), KernelSpec("route", "sm_90a"))
MEANS, ROUTE = (spec.id for spec in SPECS)


@pytest.fixture
def out(tmp_path, csrc, monkeypatch) -> Path:
    """The user's cache; its kernels are those in miniature."""
    monkeypatch.setenv("SPARGE_CACHE", str(tmp_path / "out put"))
    monkeypatch.setattr(build_module, "find_csrc", lambda: csrc)
    return tmp_path / "out put"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_missing_is_built_and_what_fails_fails_alone(
    out, compiler, csrc, capfd, monkeypatch, tmp_path
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
    built = build_module.build(SPECS, compiler, out)
    assert all(built.values()) and edges() == [MEANS, ROUTE]
    made = contents(out)
    assert build_module.build(SPECS, compiler, out) == built and edges() == []
    means, route = (next(out.glob(f"{name}.*.cubin")) for name in (MEANS, ROUTE))
    means.unlink()
    route.write_bytes(b"damaged")
    assert build_module.build(SPECS, compiler, out) == built and edges() == [MEANS, ROUTE]
    assert contents(out) == made
    (csrc / "route.cu").write_text("#error broken here\n")
    built = build_module.build(SPECS, compiler, out)
    assert [cubin is None for cubin in built.values()] == [False, True]
    assert "broken here" in capfd.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_folder_that_others_may_write_is_not_built_into(out, compiler, capsys):
    out.mkdir()
    out.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod go-w"):
        build_module.build(SPECS, compiler, out)
    assert build_module.main(["--arch", "sm_80"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert list(out.iterdir()) == []


def test_an_edge_needs_no_torch(csrc, out, compiler):
    """Importing torch takes seconds, once for every kernel."""
    program = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    edge = Path(build_module.__file__).with_name("edge.py")
    command = [sys.executable, "-c", program, edge, csrc, out, compiler.path, MEANS]
    subprocess.run(list(map(str, command)), check=True)
    assert len(list(out.glob("*.cubin"))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems have no such names")
def test_ninja_takes_paths_that_are_no_text(out, compiler, tmp_path):
    other = tmp_path / os.fsdecode(b"caf\xe9")
    assert all(build_module.build(SPECS, compiler, other).values())


def test_command_line(csrc, out, capfd, monkeypatch):
    """The kernels go into the user's cache."""
    specs, arguments = all_specs("sm_80")[:2], ["--arch", "sm_80"]
    monkeypatch.setattr(build_module, "all_specs", lambda arch: specs)
    assert build_module.main(arguments) == 0
    assert f"{len(specs)} kernels in {out}" in capfd.readouterr().out
    assert len(list(out.glob("*.cubin"))) == len(specs)
    (csrc / f"{specs[0].entry}.cu").write_text("#error broken here\n")
    assert build_module.main(arguments) == 1
    assert "broken here" in capfd.readouterr().out
    (csrc / f"{specs[0].entry}.cu").unlink()
    assert build_module.main(arguments) == 1
    assert "csrc has no" in capfd.readouterr().err
    monkeypatch.setattr(build_module, "cache_folder", lambda: None)
    with pytest.raises(SystemExit):
        build_module.main(arguments)
    assert "set SPARGE_CACHE" in capfd.readouterr().err
