# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparge.errors import KernelBuildError
from sparge.kernels import loader
from sparge.kernels.device import Capability
from sparge.kernels.nvrtc import NvrtcNotFoundError
from sparge.kernels.spec import KernelSpec, native_specs

SPEC = KernelSpec("means", "sm_90a")


@pytest.fixture
def loads(monkeypatch) -> list[KernelSpec]:
    """A usable GPU whose loads are recorded instead of done."""
    done: list[KernelSpec] = []

    def load(spec: KernelSpec, device_index: int) -> object:
        time.sleep(0.01)
        done.append(spec)
        return object()

    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(loader, "_load", load)
    monkeypatch.setattr(loader, "capabilities", lambda device: Capability(True, arch="sm_90a"))
    return done


def test_threads_that_ask_at_once_share_one_load(loads):
    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(lambda _: loader.get_kernel(SPEC, 0), range(8)))
    assert len(set(map(id, kernels))) == 1 and loads == [SPEC]
    assert loader.get_kernel(SPEC, 1) is not loader.get_kernel(SPEC, 0), "one a device"


def test_warm_loads_what_a_user_can_reach_and_reports(loads):
    seen: list[tuple[int, int, str, int]] = []
    loader.warm("cuda:0", progress=lambda *told: seen.append((*told, threading.get_ident())))
    ids = {spec.id for spec in native_specs("sm_90a")}
    assert len(loads) == len(ids) and {spec.id for spec in loads} == ids
    assert [entry[:2] for entry in seen] == [(n + 1, len(ids)) for n in range(len(ids))]
    assert {entry[2] for entry in seen} == ids
    assert {entry[3] for entry in seen} == {threading.get_ident()}
    loader.warm("cuda:0")
    assert len(loads) == len(ids)


def test_warm_hands_on_what_fails_and_what_progress_raises(loads, monkeypatch, raising):
    monkeypatch.setattr(loader.os, "cpu_count", lambda: 2)  # more would load all at once
    with pytest.raises(InterruptedError):
        loader.warm(0, progress=raising(InterruptedError()))
    assert len(loads) < len(native_specs("sm_90a")), "the rest is not loaded"

    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(loader, "_load", raising(KernelBuildError("Kernel", "the log")))
    loader.load_all([], 0)
    with pytest.raises(KernelBuildError) as caught:
        loader.warm(0)
    assert caught.value.log == "the log"
    monkeypatch.setattr(loader, "_load", lambda spec, index: spec)
    loader.load_all([SPEC], 0)
    assert loader.get_kernel(SPEC, 0) == SPEC, "a failure is not remembered"


def test_missing_compilers_and_missing_sources_are_heard(monkeypatch, raising):
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(loader, "capabilities", lambda device: Capability(True, arch="sm_90a"))
    monkeypatch.setattr(loader, "read_sources", raising(FileNotFoundError("csrc has no means.cu")))
    with pytest.raises(FileNotFoundError):
        loader.warm("cuda:0")
    monkeypatch.setattr(loader, "compiler", raising(NvrtcNotFoundError("NVRTC was not found.")))
    with pytest.raises(KernelBuildError, match="NVRTC was not found"):
        loader.warm("cuda:0")


def test_python_that_ends_waits_for_no_kernel_that_is_not_begun():
    program = """
import os, threading, time
from sparge.kernels import loader
from sparge.kernels.spec import native_specs

def load(spec, device_index):
    print(spec.id)
    begun.set()
    time.sleep(0.3)

begun = threading.Event()
loader._load, os.cpu_count = load, lambda: 1
given = native_specs("sm_90a"), 0, None
threading.Thread(target=loader.load_all, args=given, daemon=True).start()
begun.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [native_specs("sm_90a")[0].id]
