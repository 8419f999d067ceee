# SPDX-License-Identifier: Apache-2.0
"""The pip package: the library, its CUDA sources and the tools, nothing else; the registry's
rules."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
BUILD_INPUTS = (
    "sparge",
    "csrc",
    "tools",
    "nodes",
    "pyproject.toml",
    "requirements.txt",
    "README.md",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in (*BUILD_INPUTS, "LICENSE", "__init__.py"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "-w", str(out), str(source)], check=True
    )
    return next(out.glob("*.whl"))


def test_wheel_holds_the_library_and_its_sources(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    library = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "sparge").rglob("*")
        if p.suffix in (".py", ".json")
    }
    sources = {
        "sparge/" + p.relative_to(ROOT).as_posix()
        for folder in ("csrc", "tools")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".cu", ".cuh", ".py")
    }
    assert packed == library | sources
    assert "sparge/csrc/attend.cu" in packed


def test_wheel_requires_no_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", metadata, re.MULTILINE)
    assert {n for n, rest in required if "extra ==" not in rest} == {
        "numpy",
        "safetensors",
        "ninja",
    }
    assert {n for n, rest in required if "extra ==" in rest} == {"torch"}


def test_installed_library_finds_its_sources(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import sparge\n"
        "from sparge.kernels.source import find_csrc, read_sources\n"
        "print(find_csrc()); print(len(read_sources('attend').headers))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    folder, headers = done.stdout.split()
    assert Path(folder) == tmp_path / "sparge" / "csrc"
    assert int(headers) > 0


def test_installed_converter_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        name = next(n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        command = re.search(
            r"^sparge-convert-cogvideox = ([\w.]+):(\w+)$", archive.read(name).decode(), re.M
        )
    assert command
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"from {command[1]} import {command[2]}\n"
        f"sys.exit({command[2]}(['--help']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "SOURCE" in done.stdout


def test_requirements_are_plain_lines_without_torch() -> None:
    """The Manager installs line by line and would replace the user's build of a named torch."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    declared = re.search(r"^dependencies = \[(.*)\]$", PROJECT, re.MULTILINE)
    assert declared and lines == re.findall(r'"([^"]+)"', declared[1])
    for line in lines:
        name = re.fullmatch(r"([a-z][a-z0-9-]*)>=[0-9.]+", line)
        assert name and name[1] not in ("torch", "torchvision", "triton", "xformers"), line


def test_the_registry_accepts_the_project() -> None:
    def value(key: str) -> str:
        found = re.search(rf'^{key} = "([^"]*)"$', PROJECT, re.MULTILINE)
        assert found, key
        return found[1]

    name = value("name")
    assert re.fullmatch(r"[a-z]+([-_.]?[a-z0-9]+)*", name) and len(name) < 100
    assert "comfyui" not in name
    assert re.fullmatch(r"\d+\.\d+\.\d+", value("version"))
    assert value("requires-comfyui") == ">=0.33.0"
    assert (ROOT / value("web")).is_dir()
    assert value("DisplayName") and value("PublisherId")
    assert value("Repository").startswith("https://github.com/")
    assert '"Environment :: GPU :: NVIDIA CUDA"' in PROJECT
