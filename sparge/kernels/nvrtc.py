# SPDX-License-Identifier: Apache-2.0
"""NVRTC, NVIDIA's run-time compiler, through ctypes: CUDA C++ text in, cubin out.

It needs no GPU, driver, host compiler or toolkit headers.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

from . import nvrtc_find

_COMPILATION_FAILED = 6


class NvrtcNotFoundError(RuntimeError):
    """No usable NVRTC library; the text says where one would come from."""


class NvrtcError(RuntimeError):
    """NVRTC refused a program; ``log`` is what it printed."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


@dataclass(frozen=True)
class Compiled:
    image: bytes
    log: str


class Nvrtc:
    """One NVRTC library. Calls release the GIL; threads compile side by side from 13.0 on
    (12.x takes a lock of its own, so only processes do).

    Raises NvrtcNotFoundError when ``library`` cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        self.path = library
        try:
            # Kept alive with the library, which finds them by name only if already loaded.
            self._builtins = [ctypes.CDLL(str(p)) for p in nvrtc_find.builtins_of(library)]
            self._lib = _declare(ctypes.CDLL(str(library)))
        except (OSError, AttributeError) as error:
            raise NvrtcNotFoundError(f"{library} is not a usable NVRTC: {error}") from None

    @functools.cached_property
    def version(self) -> tuple[int, int]:
        major, minor = c_int(), c_int()
        self._check(self._lib.nvrtcVersion(byref(major), byref(minor)), "nvrtcVersion")
        return major.value, minor.value

    @functools.cached_property
    def archs(self) -> frozenset[int]:
        """Architecture numbers it can build, such as 80 or 120."""
        count = c_int()
        self._check(self._lib.nvrtcGetNumSupportedArchs(byref(count)), "nvrtcGetNumSupportedArchs")
        numbers = (c_int * count.value)()
        self._check(self._lib.nvrtcGetSupportedArchs(numbers), "nvrtcGetSupportedArchs")
        return frozenset(numbers)

    def compile(
        self, name: str, text: str, headers: dict[str, str], options: list[str]
    ) -> Compiled:
        """Compile ``text``; ``headers`` maps include names to texts, so no file is opened.

        Raises NvrtcError with the log when the program does not compile.
        """
        program = c_void_p()
        names, texts = _strings(headers), _strings(headers.values())
        created = self._lib.nvrtcCreateProgram(
            byref(program), text.encode(), name.encode(), len(headers), texts, names
        )
        self._check(created, f"nvrtcCreateProgram({name})")
        try:
            status = self._lib.nvrtcCompileProgram(program, len(options), _strings(options))
            raw = self._fetch(program, "nvrtcGetProgramLog")
            log = raw.rstrip(b"\0").decode("utf-8", "replace")
            if status:
                what = "does not compile" if status == _COMPILATION_FAILED else self._name(status)
                raise NvrtcError(f"{name}: {what} with {' '.join(options)}", log)
            return Compiled(self._fetch(program, "nvrtcGetCUBIN"), log)
        finally:
            self._lib.nvrtcDestroyProgram(byref(program))

    def _fetch(self, program: c_void_p, function: str) -> bytes:
        size = c_size_t()
        self._check(getattr(self._lib, f"{function}Size")(program, byref(size)), function)
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, function)(program, buffer), function)
        return buffer.raw

    def _check(self, status: int, function: str) -> None:
        if status:
            raise NvrtcError(f"{function} failed: {self._name(status)}")

    def _name(self, status: int) -> str:
        return self._lib.nvrtcGetErrorString(status).decode()


@functools.cache
def load(prefer_major: int | None = None) -> Nvrtc:
    """The first NVRTC of this Python environment or system that loads.

    Raises NvrtcNotFoundError when there is none, saying what was tried.
    """
    failures = []
    for library in nvrtc_find.libraries(prefer_major):
        try:
            return Nvrtc(library)
        except NvrtcNotFoundError as error:
            failures.append(str(error))
    raise NvrtcNotFoundError(
        " ".join(failures)
        or "NVIDIA's run-time compiler NVRTC was not found. It comes with PyTorch builds for CUDA; "
        "otherwise install the package nvidia-cuda-nvrtc of your CUDA version."
    )


def _strings(values: object) -> ctypes.Array[c_char_p]:
    encoded = [value.encode() for value in values]  # type: ignore[attr-defined]
    return (c_char_p * len(encoded))(*encoded)


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    strings = POINTER(c_char_p)
    arguments = {
        "nvrtcVersion": [POINTER(c_int), POINTER(c_int)],
        "nvrtcGetNumSupportedArchs": [POINTER(c_int)],
        "nvrtcGetSupportedArchs": [POINTER(c_int)],
        "nvrtcCreateProgram": [POINTER(c_void_p), c_char_p, c_char_p, c_int, strings, strings],
        "nvrtcCompileProgram": [c_void_p, c_int, strings],
        "nvrtcDestroyProgram": [POINTER(c_void_p)],
        "nvrtcGetProgramLogSize": [c_void_p, POINTER(c_size_t)],
        "nvrtcGetProgramLog": [c_void_p, c_char_p],
        "nvrtcGetCUBINSize": [c_void_p, POINTER(c_size_t)],
        "nvrtcGetCUBIN": [c_void_p, c_char_p],
    }
    for function, types in arguments.items():
        getattr(lib, function).argtypes = types
    lib.nvrtcGetErrorString.argtypes = [c_int]
    lib.nvrtcGetErrorString.restype = c_char_p
    return lib
