# SPDX-License-Identifier: Apache-2.0
"""NVRTC, NVIDIA's run-time compiler, through ctypes: where it lies, and CUDA C++ text to cubin.

It needs no GPU, driver, host compiler or toolkit headers. torch brings it, or a wheel, or a CUDA
toolkit.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

from ..errors import KernelBuildError
from .cubin import Cubin
from .source import Sources
from .spec import ARCHS, KernelSpec

_COMPILATION_FAILED = 6
_WINDOWS = sys.platform == "win32"
#: For a profiler that shows our lines add "-lineinfo" here; by default it is absent because it
#: makes the files 3 to 4 times larger (200-600 KB each).
#: Plain constexpr functions are for the device too.
_OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")
#: From this version on NVRTC looks into the driver's cache; what it finds there comes without the
#: assembler's report.
_NVRTC_CACHES = (12, 9)
_NVRTC_NO_CACHE = "--no-cache"


def options(spec: KernelSpec) -> list[str]:
    """Options that the compiler is told."""
    return [f"--gpu-architecture={ARCHS[spec.arch].target}", *_OPTIONS, *spec.defines]


class NvrtcNotFoundError(RuntimeError):
    """No usable NVRTC library; the text says where one would come from."""


class NvrtcError(KernelBuildError):
    """NVRTC refused a program."""


class Nvrtc:
    """One NVRTC library. Calls release the GIL; threads compile side by side from 13.0 on
    (12.x takes a lock of its own, so only processes do). `label` (such as ``nvrtc13.0``) is part of
    a cubin's name in the cache.

    Raises NvrtcNotFoundError when ``library`` cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        self.path = library
        try:
            # Kept alive with the library, which finds them by name only if already loaded.
            self._builtins = [ctypes.CDLL(str(p)) for p in _builtins_of(library)]
            self._lib = _declare(ctypes.CDLL(str(library)))
        except (OSError, AttributeError) as error:
            raise NvrtcNotFoundError(f"{library} is not a usable NVRTC: {error}") from None

    @property
    def label(self) -> str:
        return "nvrtc{}.{}".format(*self.version)

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

    def compile(self, spec: KernelSpec, sources: Sources) -> Cubin:
        """Raises KernelBuildError with the compiler's log."""
        flags = options(spec)
        if self.version >= _NVRTC_CACHES:
            flags.append(_NVRTC_NO_CACHE)
        try:
            built = self.compile_text(sources.name, sources.text, sources.headers, flags)
        except NvrtcError as error:
            why = f"Kernel {spec.id} does not compile with {self.label}."
            raise KernelBuildError(why, error.log or str(error)) from None
        # Two builds of a kernel give the same words.
        words = [line for line in built.log.splitlines() if "Compile time" not in line]
        return Cubin(built.image, "\n".join(words))

    def compile_text(
        self, name: str, text: str, headers: dict[str, str], options: list[str]
    ) -> Cubin:
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
            return Cubin(self._fetch(program, "nvrtcGetCUBIN"), log)
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
    for library in libraries(prefer_major):
        try:
            return Nvrtc(library)
        except NvrtcNotFoundError as error:
            failures.append(str(error))
    raise NvrtcNotFoundError(
        " ".join(failures)
        or "NVIDIA's run-time compiler NVRTC was not found. It comes with PyTorch builds for CUDA; "
        "otherwise install the package nvidia-cuda-nvrtc of your CUDA version."
    )


def _strings(values: Iterable[str]) -> ctypes.Array[c_char_p]:
    encoded = [value.encode() for value in values]
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


def _library_pattern(platform: str) -> re.Pattern[str]:
    """Pattern of a file name; group 1 is the CUDA major version. Twins named ``.alt.`` are left
    out."""
    windows = platform == "win32"
    return re.compile(r"nvrtc64_(\d+)\d_0\.dll" if windows else r"libnvrtc\.so\.(\d+)")


_LIBRARY = _library_pattern(sys.platform)
_BUILTINS = "nvrtc-builtins64_*.dll" if _WINDOWS else "libnvrtc-builtins.so.*"


def libraries(prefer_major: int | None = None) -> list[Path]:
    """Every NVRTC found, best first.

    ``prefer_major`` is the CUDA major version torch was built for: that NVRTC fits the driver
    torch needs, while a 12.x driver refuses the cubins of a 13.x NVRTC.
    """
    found = [
        (int(match[1]), library)
        for folder in _folders()
        for library in _files(folder)
        if (match := _LIBRARY.fullmatch(library.name))
    ]
    found.sort(key=lambda entry: entry[0] != prefer_major)  # stable: keeps the folders' order
    return list(dict.fromkeys(library for _, library in found))


def _files(folder: Path) -> list[Path]:
    """Files of a folder; none where it is not there, or not for this user to enter."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _builtins_of(library: Path) -> list[Path]:
    """The device headers NVRTC opens by bare name: they must be in memory before it looks."""
    return sorted(p for p in library.parent.glob(_BUILTINS) if ".alt." not in p.name)


def _folders() -> Iterator[Path]:
    for package in _package_folders("torch"):
        yield package / "lib"
    for nvidia in _package_folders("nvidia"):
        for wheel in ("cu13", "cuda_nvrtc"):
            yield nvidia / wheel / "lib"
            yield nvidia / wheel / "bin" / "x86_64"
            yield nvidia / wheel / "bin"
    # conda keeps its libraries here
    yield Path(sys.prefix) / "lib"
    yield Path(sys.prefix) / "Library" / "bin"
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if toolkit := os.environ.get(variable):
            yield from _toolkit_folders(Path(toolkit))
    if not _WINDOWS:
        yield from _toolkit_folders(Path("/usr/local/cuda"))
        yield Path("/usr/lib/x86_64-linux-gnu")
        yield Path("/usr/lib/aarch64-linux-gnu")
        yield Path("/usr/lib64")


def _toolkit_folders(toolkit: Path) -> list[Path]:
    return [toolkit / "lib64", toolkit / "bin" / "x64", toolkit / "bin"]


def _package_folders(name: str) -> list[Path]:
    """Folders of an installed top-level package, without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
