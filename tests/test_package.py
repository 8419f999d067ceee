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
    *("sparge", "csrc", "tools", "nodes", "pyproject.toml", "requirements.txt", "README.md"),
    *("LICENSE", "__init__.py"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in BUILD_INPUTS:
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


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def python(installed: Path, *lines: str) -> str:
    code = "\n".join((f"import sys; sys.path.insert(0, {str(installed)!r})", *lines))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=installed, capture_output=True, text=True, check=True)
    return done.stdout


def test_wheel_holds_the_library_and_its_sources(installed: Path) -> None:
    def found(root: Path, *folders: str) -> set[str]:
        kinds = (".py", ".json", ".cu", ".cuh")
        paths = (path for folder in folders for path in (root / folder).rglob("*"))
        return {p.relative_to(root).as_posix() for p in paths if p.suffix in kinds}

    packed = {name for name in found(installed, ".") if ".dist-info/" not in name}
    sources = {f"sparge/{name}" for name in found(ROOT, "csrc", "tools")}
    assert packed == found(ROOT, "sparge") | sources
    assert "sparge/csrc/attend.cu" in packed


def test_wheel_requires_no_torch(installed: Path) -> None:
    (metadata,) = (path.read_text("utf-8") for path in installed.glob("*.dist-info/METADATA"))
    required = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", metadata, re.MULTILINE)
    always = {name for name, rest in required if "extra ==" not in rest}
    assert always == {"numpy", "safetensors", "ninja"}
    assert {name for name, _ in required} - always == {"torch"}


def test_installed_library_finds_its_sources_and_the_converter_runs(installed: Path) -> None:
    (points,) = (p.read_text("utf-8") for p in installed.glob("*.dist-info/entry_points.txt"))
    command = re.search(r"^sparge-convert-cogvideox = ([\w.]+):(\w+)$", points, re.M)
    assert command
    module, name = command.groups()
    said = python(
        installed,
        "from sparge.kernels.source import find_csrc, read_sources",
        "print(find_csrc()); print(len(read_sources('attend').headers))",
        f"from {module} import {name}; sys.exit({name}(['--help']))",
    )
    folder, headers, *usage = said.split()
    assert Path(folder) == installed / "sparge" / "csrc" and int(headers) > 0
    assert "SOURCE" in " ".join(usage)


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
