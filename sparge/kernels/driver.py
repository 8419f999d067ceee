# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver through ctypes: load a cubin on one device, launch its kernel on a stream."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from typing import Any

from .cubin import LaunchInfo, read_launch_info, read_sizes, read_static_shared

_INVALID_CONTEXT = 201
_INVALID_HANDLE = 400
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class DriverNotFoundError(RuntimeError):
    """The NVIDIA driver's library is not on this machine."""


class DriverError(RuntimeError):
    """A driver call failed."""

    def __init__(self, function: str, name: str, text: str) -> None:
        """name: CUDA's, such as ``CUDA_ERROR_OUT_OF_MEMORY``."""
        super().__init__(f"{function} failed: {name} ({text})")


@functools.cache
def library() -> ctypes.CDLL:
    """The driver, declared. Raises DriverNotFoundError."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        lib = ctypes.CDLL(name)
    except OSError:
        raise DriverNotFoundError(f"the NVIDIA driver ({name}) is not installed") from None
    return declare(lib)


def declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer = POINTER(c_void_p)
    arguments = {
        "cuInit": [c_uint],
        "cuDriverGetVersion": [POINTER(c_int)],
        "cuGetErrorName": [c_int, POINTER(c_char_p)],
        "cuGetErrorString": [c_int, POINTER(c_char_p)],
        "cuDeviceGet": [POINTER(c_int), c_int],
        "cuDevicePrimaryCtxRetain": [pointer, c_int],
        "cuCtxPushCurrent_v2": [c_void_p],
        "cuCtxPopCurrent_v2": [pointer],
        "cuModuleLoadData": [pointer, c_char_p],
        "cuModuleGetFunction": [pointer, c_void_p, c_char_p],
        "cuFuncSetAttribute": [c_void_p, c_int, c_int],
        "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
    }
    for function, types in arguments.items():
        getattr(lib, function).argtypes = types
    return lib


def check(lib: ctypes.CDLL, function: str, status: int) -> None:
    """Raises DriverError with CUDA's name and words for a status that is not success."""
    if status:
        name, text = c_char_p(), c_char_p()
        lib.cuGetErrorName(status, byref(name))
        lib.cuGetErrorString(status, byref(text))
        words = (value.value or b"unknown" for value in (name, text))
        raise DriverError(function, *(word.decode() for word in words))


def driver_version() -> int:
    """Newest CUDA of the driver, such as 13000 for 13.0. Raises DriverError."""
    version = c_int()
    check(library(), "cuDriverGetVersion", library().cuDriverGetVersion(byref(version)))
    return version.value


@functools.cache
def primary_context(device_index: int) -> c_void_p:
    """The context torch uses on this device; held until the process ends. Raises DriverError."""
    lib = library()
    check(lib, "cuInit", lib.cuInit(0))
    device, context = c_int(), c_void_p()
    check(lib, "cuDeviceGet", lib.cuDeviceGet(byref(device), device_index))
    retained = lib.cuDevicePrimaryCtxRetain(byref(context), device)
    check(lib, "cuDevicePrimaryCtxRetain", retained)
    return context


@contextmanager
def current(lib: ctypes.CDLL, context: c_void_p) -> Iterator[None]:
    check(lib, "cuCtxPushCurrent", lib.cuCtxPushCurrent_v2(context))
    try:
        yield
    finally:
        check(lib, "cuCtxPopCurrent", lib.cuCtxPopCurrent_v2(byref(c_void_p())))


class Kernel:
    """A kernel loaded on one device. ``info``, ``sizes`` and ``static_shared`` are what its cubin
    says about a launch.

    Raises DriverError when the driver refuses the image.
    """

    def __init__(self, image: bytes, entry: str, device_index: int) -> None:
        self.info: LaunchInfo = read_launch_info(image)
        self.sizes: Any = read_sizes(image, entry)
        self.static_shared = read_static_shared(image, entry)
        self.device_index = device_index
        self._lib = lib = library()
        self._context = primary_context(device_index)
        self._module, self._function = c_void_p(), c_void_p()
        self._shared_allowed = 0
        self._allowing = threading.Lock()  # threads may launch calls of different lengths
        with current(lib, self._context):
            check(lib, "cuModuleLoadData", lib.cuModuleLoadData(byref(self._module), image))
            found = lib.cuModuleGetFunction(byref(self._function), self._module, entry.encode())
            check(lib, f"cuModuleGetFunction({entry})", found)
        self.allow_shared(0)
        self._launch = lib.cuLaunchKernel

    def allow_shared(self, extra_shared: int) -> None:
        """Lets launches ask for so many bytes of dynamic shared memory beyond
        ``info.shared_bytes``. Raises DriverError."""
        size = self.info.shared_bytes + extra_shared
        with self._allowing:
            if size <= self._shared_allowed:
                return
            # Sizes above 48 KiB must be asked for.
            with current(self._lib, self._context):
                status = self._lib.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, size)
                check(self._lib, f"cuFuncSetAttribute({size} bytes of shared memory)", status)
            self._shared_allowed = size

    def launch(
        self, grid: tuple[int, int, int], pointer: int, extra_shared: int, stream: int
    ) -> None:
        """Queue the kernel on ``stream`` (a ``cuda_stream`` handle of this device).

        ``pointer`` is where the address of the parameter block lies, which is copied before the
        call returns; ``extra_shared`` no more than `allow_shared` was asked for. Raises
        DriverError.
        """
        shared, threads = self.info.shared_bytes + extra_shared, self.info.threads
        x, y, z = grid
        arguments = (self._function, x, y, z, threads, 1, 1, shared, stream, pointer, None)
        status = self._launch(*arguments)
        if status in (_INVALID_CONTEXT, _INVALID_HANDLE):
            # This thread has no context yet, or another device's: launch in the kernel's own.
            with current(self._lib, self._context):
                status = self._launch(*arguments)
        if status:
            check(self._lib, "cuLaunchKernel", status)
