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


USABLE = kernels.Capability(True, "", "sm_89")


@pytest.mark.parametrize(
    ("capability", "fails", "words"),
    [
        (USABLE, False, ("Card 0", "sm_89", "3 of 3", "ready in")),
        (USABLE, True, ("disk full",)),
        (kernels.Capability(False, "It is too old.", ""), True, ("stays dense. It is too old.",)),
    ],
)
def test_every_usable_gpu_is_prepared_and_what_went_wrong_is_told(
    install: ModuleType, monkeypatch, capsys, capability: kernels.Capability, fails: bool, words
) -> None:
    """An install never fails for it."""
    done: list[object] = []

    def warm(device: int, progress: kernels.loader.Progress) -> None:
        assert capability.usable, "nothing to compile"
        if fails:
            raise OSError("disk full")
        done.append(device)
        progress(3, 3, "attend-sm_89-d128")

    monkeypatch.setattr(kernels, "capabilities", lambda device: capability)
    monkeypatch.setattr(build, "prepare", done.append)
    monkeypatch.setattr(kernels, "warm", warm)
    assert install.main() == 0
    assert fails or done == ["sm_89", 0]
    said = capsys.readouterr().out
    assert all(word in said for word in words)


def test_it_starts_no_other_program() -> None:
    """No pip, no compiler, no download: the registry's rules, and the user's trust."""
    imported = {name.split(".")[0] for name in imports(ROOT / "install.py")}
    assert imported == {"__future__", "sys", "time", "pathlib", "torch", "sparge"}


@pytest.mark.gpu
def test_it_runs_on_a_gpu() -> None:
    assert "ready in" in run()
