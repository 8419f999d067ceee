# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time

import pytest

from sparge.errors import KernelBuildError
from sparge.kernels import loader
from sparge.kernels.device import Capability
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
    monkeypatch.setattr(loader, "capabilities", lambda device: Capability(True, "", "sm_90a"))
    return done


def test_a_kernel_is_loaded_once_a_device(loads):
    assert loader.get_kernel(SPEC, 0) is loader.get_kernel(KernelSpec("means", "sm_90a"), 0)
    assert loader.get_kernel(SPEC, 1) is not loader.get_kernel(SPEC, 0)
    assert len(loads) == 2


def test_threads_that_ask_at_once_share_one_load(loads):
    kernels: list[object] = []
    threads = [
        threading.Thread(target=lambda: kernels.append(loader.get_kernel(SPEC, 0)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, kernels))) == 1
    assert loads == [SPEC]


def test_warm_loads_what_a_user_can_reach_and_reports(loads):
    seen: list[tuple[int, int, str]] = []
    caller = threading.get_ident()

    def progress(done: int, total: int, text: str) -> None:
        assert threading.get_ident() == caller
        seen.append((done, total, text))

    loader.warm("cuda:0", progress=progress)
    wanted = native_specs("sm_90a")
    assert sorted(s.id for s in loads) == sorted(s.id for s in wanted)
    assert [done for done, _, _ in seen] == list(range(1, len(wanted) + 1))
    assert {text for _, _, text in seen} == {spec.id for spec in wanted}
    loader.warm("cuda:0")
    assert len(loads) == len(wanted)


def test_warm_of_nothing_and_of_one(loads):
    loader.warm(0, [])
    loader.warm(0, [SPEC])
    assert loads == [SPEC]


def test_warm_hands_on_a_failure(loads, monkeypatch):
    def broken(spec, device_index):
        raise KernelBuildError("Kernel does not compile.", "the log")

    monkeypatch.setattr(loader, "_load", broken)
    with pytest.raises(KernelBuildError) as caught:
        loader.warm(0)
    assert caught.value.log == "the log"
    monkeypatch.setattr(loader, "_load", lambda spec, index: spec)
    assert loader.get_kernel(SPEC, 0) == SPEC, "a failure is not remembered"


def test_progress_that_raises_cancels_the_rest(loads):
    def cancel(done: int, total: int, text: str) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        loader.warm(0, progress=cancel)
    assert len(loads) < len(native_specs("sm_90a"))
