# SPDX-License-Identifier: Apache-2.0
"""install.py as ComfyUI-Manager runs it: in the pack's folder, by the Python of ComfyUI."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sparge import kernels
from sparge.kernels import build
from tests.test_layers import imports

ROOT = Path(__file__).resolve().parents[1]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "install.py"], cwd=ROOT, capture_output=True, text=True
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return module


def one_gpu(monkeypatch: pytest.MonkeyPatch, capability: kernels.Capability) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    monkeypatch.setattr(kernels, "capabilities", lambda device: capability)


def test_a_machine_without_a_gpu_reads_the_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    # -I leaves the script's folder off sys.path, as an embedded Python does.
    done = run("-I")
    assert done.returncode == 0, done.stderr
    assert kernels.capabilities("cuda").reason in done.stdout
    assert done.stderr == ""


def test_a_python_without_torch_is_no_error() -> None:
    done = run("-I", "-S")
    assert done.returncode == 0, done.stderr
    assert "lacks torch" in done.stdout


def test_every_usable_gpu_is_prepared(install: ModuleType, monkeypatch, capsys) -> None:
    one_gpu(monkeypatch, kernels.Capability(True, "", "sm_89"))
    prepared = []
    compiled = []
    monkeypatch.setattr(build, "prepare", compiled.append)

    def warm(device: int, progress: kernels.loader.Progress) -> None:
        prepared.append(device)
        progress(3, 3, "attend-sm_89-d128")

    monkeypatch.setattr(kernels, "warm", warm)
    assert install.main() == 0
    assert compiled == ["sm_89"] and prepared == [0]
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

    one_gpu(monkeypatch, capability)
    monkeypatch.setattr(build, "prepare", lambda arch: None)
    monkeypatch.setattr(kernels, "warm", warm)
    assert install.main() == 0
    assert said in capsys.readouterr().out


def test_it_starts_no_other_program() -> None:
    """No pip, no compiler, no download: the registry's rules, and the user's trust."""
    imported = {name.split(".")[0] for name in imports(ROOT / "install.py")}
    assert imported == {"__future__", "sys", "time", "pathlib", "torch", "sparge"}


@pytest.mark.gpu
def test_the_second_run_takes_seconds() -> None:
    assert run().returncode == 0
    started = time.perf_counter()
    done = run()
    assert "ready in" in done.stdout
    assert time.perf_counter() - started < 30  # most of it is the import of torch
