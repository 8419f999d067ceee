# SPDX-License-Identifier: Apache-2.0
"""install.py as ComfyUI-Manager runs it: in the pack's folder, by the Python of ComfyUI."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sparge import kernels
from sparge.kernels import build
from tests.test_layers import imports

ROOT = Path(__file__).resolve().parents[1]


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


def test_a_machine_without_a_gpu_reads_the_reason_and_one_without_torch_too() -> None:
    # -I leaves the script's folder off sys.path, as an embedded Python does.
    assert "lacks torch" in run("-I", "-S")
    if not torch.cuda.is_available():
        assert kernels.capabilities("cuda").reason in run("-I")


def test_every_usable_gpu_is_prepared(install: ModuleType, monkeypatch, capsys) -> None:
    done = []

    def warm(device: int, progress: kernels.loader.Progress) -> None:
        done.append(device)
        progress(3, 3, "attend-sm_89-d128")

    monkeypatch.setattr(kernels, "capabilities", lambda _: kernels.Capability(True, "", "sm_89"))
    monkeypatch.setattr(build, "prepare", done.append)
    monkeypatch.setattr(kernels, "warm", warm)
    assert install.main() == 0 and done == ["sm_89", 0]
    text = capsys.readouterr().out
    assert "Card 0" in text and "sm_89" in text and "3 of 3" in text and "ready in" in text


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        (kernels.Capability(False, "Card 0 is too old.", ""), "stays dense. Card 0 is too old."),
        (kernels.Capability(True, "", "sm_89"), "disk full"),
    ],
)
def test_what_went_wrong_is_told_and_is_no_failed_install(
    install: ModuleType, monkeypatch, capsys, capability: kernels.Capability, said: str
) -> None:
    def warm(device: int, progress: object) -> None:
        assert capability.usable, "nothing to compile"
        raise OSError("disk full")

    monkeypatch.setattr(kernels, "capabilities", lambda device: capability)
    monkeypatch.setattr(build, "prepare", lambda arch: None)
    monkeypatch.setattr(kernels, "warm", warm)
    assert install.main() == 0
    assert said in capsys.readouterr().out


def test_it_starts_no_other_program() -> None:
    """No pip, no compiler, no download: the registry's rules, and the user's trust."""
    imported = {name.split(".")[0] for name in imports(ROOT / "install.py")}
    assert imported == {"__future__", "sys", "time", "pathlib", "torch", "sparge"}


@pytest.mark.gpu
def test_it_runs_on_a_gpu() -> None:
    assert "ready in" in run()
