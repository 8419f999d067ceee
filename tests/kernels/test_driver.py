# SPDX-License-Identifier: Apache-2.0
"""The launch path against a stand-in for the driver's library; tests/gpu has the real one."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from sparge.kernels import driver
from sparge.kernels.driver import DriverError, DriverNotFoundError, Kernel
from sparge.kernels.source import read_sources
from sparge.kernels.spec import KernelSpec


class Params(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("count", ctypes.c_int32))


class FakeDriver:
    """Answers success and records; ``fail[function]`` is a list of statuses to answer first."""

    def __init__(self) -> None:
        self.launches: list[tuple] = []  # sizes, stream, parameters, contexts
        self.shared: list[int] = []
        self.contexts: list[int] = []
        self.fail: dict[str, list[int]] = {}

    def __getattr__(self, function: str):
        if not function.startswith("cu"):
            raise AttributeError(function)
        act = {
            "cuGetErrorName": lambda _, out: _answer(out, b"CUDA_ERROR_TEST"),
            "cuGetErrorString": lambda _, out: _answer(out, b"what the driver says"),
            "cuDeviceGet": _answer,
            "cuDeviceGetAttribute": lambda out, of, device: _answer(out, 100 * device.value + of),
            "cuDevicePrimaryCtxRetain": lambda out, device: _answer(out, 0x1000 + device.value),
            "cuCtxPushCurrent_v2": lambda context: self.contexts.append(context.value),
            "cuCtxPopCurrent_v2": lambda out: self.contexts.pop(),
            "cuFuncSetAttribute": self._attribute,
            "cuLaunchKernel": self._launch,
        }.get(function, lambda *arguments: None)

        def call(*arguments) -> int:
            act(*arguments)
            statuses = self.fail.get(function)
            return statuses.pop(0) if statuses else 0

        return call

    def _attribute(self, function, attribute, value) -> None:
        assert attribute == 8 and self.contexts, "an attribute is set in the kernel's context"
        self.shared.append(value)

    def _launch(self, function, *arguments) -> None:
        *sizes, stream, parameters, extra = arguments
        assert extra is None
        params = Params.from_address(ctypes.c_uint64.from_address(parameters).value)
        launch = (tuple(sizes), stream, (params.pointer, params.count), list(self.contexts))
        self.launches.append(launch)


def _answer(out, value) -> None:
    out._obj.value = value


@pytest.fixture
def fake(monkeypatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    driver.primary_context.cache_clear()
    monkeypatch.setattr(driver, "library", lambda: fake)
    yield fake
    assert fake.contexts == [], "the thread's context is as it was"
    driver.primary_context.cache_clear()


@pytest.fixture
def image(csrc, compiler) -> bytes:
    return compiler.compile(KernelSpec("route", "sm_80"), read_sources("route", csrc)).image


def launch(
    kernel: Kernel, grid=(1, 1, 1), params=None, extra_shared: int = 0, stream: int = 0
) -> None:
    params = Params() if params is None else params
    pointer = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    kernel.allow_shared(extra_shared)
    kernel.launch(grid, ctypes.addressof(pointer), extra_shared, stream)


def test_launch_passes_one_struct_and_the_cubins_numbers(fake, image):
    kernel = Kernel(image, "route", 3)
    launch(kernel, (5, 6, 7), Params(0x1234, 42), stream=99)
    sizes = (5, 6, 7, 96, 1, 1, 4096)
    assert fake.launches == [(sizes, 99, (0x1234, 42), [])], "torch's own context is left alone"
    for extra in (1000, 500, 1000, 2000):
        launch(kernel, extra_shared=extra)
    assert [sizes[-1] for sizes, *_ in fake.launches[1:]] == [5096, 4596, 5096, 6096]
    assert fake.shared == [4096, 5096, 6096], "more is asked for once"


def test_threads_never_lower_what_is_allowed(fake, image):
    """Two whose calls differ in length begin at once; the longer one is first to be allowed."""
    kernel = Kernel(image, "route", 0)
    longer_asked, attribute = threading.Event(), fake._attribute

    def slow_to_answer(function, which, value) -> None:
        attribute(function, which, value)
        if value == 6096:
            longer_asked.set()
            time.sleep(0.05)

    fake._attribute = slow_to_answer
    longer = threading.Thread(target=kernel.allow_shared, args=(2000,))
    longer.start()
    longer_asked.wait()
    kernel.allow_shared(1000)
    longer.join()
    assert fake.shared == [4096, 6096]


@pytest.mark.parametrize("status", [201, 400])
def test_a_thread_without_context_borrows_the_kernels(fake, image, status):
    kernel = Kernel(image, "route", 2)
    fake.fail["cuLaunchKernel"] = [status]
    launch(kernel)
    assert [contexts for *_, contexts in fake.launches] == [[], [0x1002]]


def test_what_fails_is_an_exception_with_cudas_words(fake, image, monkeypatch, raising):
    """And the context is as it was."""
    for function, statuses in (
        ("cuLaunchKernel", [700]), ("cuLaunchKernel", [400, 400]), ("cuFuncSetAttribute", [1]),
    ):  # fmt: skip
        kernel = Kernel(image, "route", 0)
        fake.fail[function] = statuses
        words = r"CUDA_ERROR_TEST \(what the driver says\)"
        with pytest.raises(DriverError, match=words) as caught:
            launch(kernel, extra_shared=4)
        assert function in str(caught.value)
        assert fake.contexts == []
    for function in ("cuInit", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"):
        driver.primary_context.cache_clear()
        fake.fail[function] = [209]
        with pytest.raises(DriverError, match=function):
            Kernel(image, "route", 0)
        assert fake.contexts == []
    monkeypatch.undo()
    monkeypatch.setattr(driver.ctypes, "CDLL", raising(OSError("cannot open shared object file")))
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda"
    with pytest.raises(DriverNotFoundError, match=name):
        driver.library.__wrapped__()
