# SPDX-License-Identifier: Apache-2.0
"""The pip package: the library, its CUDA sources and the tools, nothing else; the registry's
rules."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
BUILD_INPUTS = (
    "sparge csrc tools nodes pyproject.toml requirements.txt README.md LICENSE __init__.py"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    source, out, folder = map(tmp_path_factory.mktemp, ("source", "wheel", "installed"))
    for path in (ROOT / name for name in BUILD_INPUTS.split()):
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, source / path.name, ignore=ignored)
        else:
            shutil.copy(path, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "-w", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (wheel,) = out.glob("*.whl")
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


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
    code = f"""
import sys; sys.path.insert(0, {str(installed)!r})
from sparge.kernels.source import find_csrc, read_sources
print(find_csrc(), len(read_sources("attend").headers))
from {module} import {name}; sys.exit({name}(["--help"]))"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, capture_output=True, text=True, check=True
    )
    folder, headers, *usage = done.stdout.split()
    assert Path(folder) == installed / "sparge" / "csrc" and int(headers) > 0
    assert "SOURCE" in usage


def test_requirements_are_plain_lines_without_torch() -> None:
    """The Manager installs line by line and would replace the user's build of a named torch."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    declared = re.search(r"^dependencies = \[(.*)\]$", PROJECT, re.MULTILINE)
    assert declared and lines == re.findall(r'"([^"]+)"', declared[1])
    for line in lines:
        name = re.fullmatch(r"([a-z][a-z0-9-]*)>=[0-9.]+", line)
        assert name and name[1] not in ("torch", "torchvision", "triton", "xformers"), line


def test_the_registry_accepts_the_project() -> None:
    value = dict(re.findall(r'^([\w-]+) = "([^"]*)"$', PROJECT, re.MULTILINE))
    name = value["name"]
    assert re.fullmatch(r"[a-z]+([-_.]?[a-z0-9]+)*", name) and len(name) < 100
    assert "comfyui" not in name
    assert re.fullmatch(r"\d+\.\d+\.\d+", value["version"])
    assert value["requires-comfyui"] == ">=0.33.0"
    assert (ROOT / value["web"]).is_dir()
    assert value["DisplayName"] and value["PublisherId"]
    assert value["Repository"].startswith("https://github.com/")
    assert '"Environment :: GPU :: NVIDIA CUDA"' in PROJECT
