# SPDX-License-Identifier: Apache-2.0
"""The pip package, the registry's rules, and install.py as ComfyUI-Manager runs it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sparge import kernels
from tests.test_layers import imports

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
BUILD_INPUTS = "sparge csrc tools nodes pyproject.toml requirements.txt README.md LICENSE"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made of the sdist, unpacked."""
    source, out, folder = map(tmp_path_factory.mktemp, ("source", "built", "installed"))
    ignored = shutil.ignore_patterns("__pycache__")
    for path in (ROOT / name for name in [*BUILD_INPUTS.split(), "__init__.py"]):
        if path.is_dir():
            shutil.copytree(path, source / path.name, ignore=ignored)
        else:
            shutil.copy(path, source)
    make = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", make], cwd=source, capture_output=True, text=True, check=True
    )
    assert "deprecated" not in done.stdout + done.stderr, done.stderr
    (sdist,) = out.glob("*.tar.gz")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "-w", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(sdist)], check=True)
    (wheel,) = out.glob("*.whl")
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


def test_wheel_holds_the_library_and_its_sources(installed: Path) -> None:
    def found(root: Path, *folders: str) -> set[str]:
        kinds = (".py", ".json", ".cu", ".cuh", ".typed")
        paths = (path for folder in folders for path in (root / folder).rglob("*"))
        return {p.relative_to(root).as_posix() for p in paths if p.suffix in kinds}

    packed = {name for name in found(installed, ".") if ".dist-info/" not in name}
    sources = {f"sparge/{name}" for name in found(ROOT, "csrc")}
    assert packed == found(ROOT, "sparge") | sources
    assert {"sparge/csrc/attend.cu", "sparge/py.typed"} <= packed


def test_wheel_requires_no_torch(installed: Path) -> None:
    (metadata,) = (path.read_text("utf-8") for path in installed.glob("*.dist-info/METADATA"))
    required = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", metadata, re.MULTILINE)
    always = {name for name, rest in required if "extra ==" not in rest}
    assert always == {"numpy", "safetensors", "ninja"}
    assert {name for name, _ in required} - always == {
        "torch",
        "transformers",
        "diffusers",
        "accelerate",
    }


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


def run(*options: str) -> str:
    command = [sys.executable, *options, "install.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    return module


def test_a_python_without_torch_is_told() -> None:
    # -I leaves the script's folder off sys.path, as an embedded Python does.
    assert "lacks torch" in run("-I", "-S")


def test_a_torch_that_does_not_load_is_not_called_missing(tmp_path, monkeypatch) -> None:
    error = "libcudart.so.12: cannot open shared object file"
    (tmp_path / "torch.py").write_text(f"raise ImportError({error!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = run()
    assert f"could not be prepared: {error}" in said and "lacks" not in said


@pytest.mark.parametrize(
    ("capability", "fails", "words"),
    [
        ((True, "", "sm_89"), False, ("Card 0", "sm_89", "3 of 3", "ready in")),
        ((True, "", "sm_89"), True, ("disk full",)),
        ((False, "It is too old.", ""), True, ("stays dense. It is too old.",)),
    ],
)
def test_every_usable_gpu_is_prepared_and_what_went_wrong_is_told(
    install: ModuleType, monkeypatch, capsys, capability: tuple, fails: bool, words
) -> None:
    """An install never fails for it."""
    done: list[object] = []

    def warm(device: int, progress: kernels.loader.Progress) -> None:
        assert capability[0], "nothing to compile"
        if fails:
            raise OSError("disk full")
        done.append(device)
        progress(3, 3, "attend-sm_89-d128")

    monkeypatch.setattr(kernels, "capabilities", lambda device: kernels.Capability(*capability))
    monkeypatch.setattr(kernels, "warm", warm)
    assert install.main() == 0
    assert fails or done == [0]
    said = capsys.readouterr().out
    assert all(word in said for word in words)


def test_it_starts_no_other_program() -> None:
    """No pip, no compiler, no download: the registry's rules, and the user's trust."""
    imported = {name.split(".")[0] for name in imports(ROOT / "install.py")}
    assert imported == {"__future__", "sys", "time", "pathlib", "torch", "sparge"}


@pytest.mark.gpu
def test_it_runs_on_a_gpu() -> None:
    assert "ready in" in run()
