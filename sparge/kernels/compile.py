# SPDX-License-Identifier: Apache-2.0
"""Compilation of a spec and its sources to a cubin: the one list of options."""

from __future__ import annotations

from typing import Protocol

from ..errors import KernelBuildError
from .cubin import Cubin
from .nvrtc import Nvrtc, NvrtcError
from .source import Sources
from .spec import ARCHS, KernelSpec

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


def options_key(spec: KernelSpec) -> str:
    """Changes whenever the options do."""
    return " ".join(options(spec))


class Compiler(Protocol):
    """``label`` (such as ``nvrtc13.0``) is part of a cubin's name in the cache."""

    @property
    def label(self) -> str: ...

    @property
    def version(self) -> tuple[int, int]: ...

    def compile(self, spec: KernelSpec, sources: Sources) -> Cubin:
        """Raises KernelBuildError with the compiler's log."""
        ...


class NvrtcCompiler:
    def __init__(self, nvrtc: Nvrtc) -> None:
        self.nvrtc = nvrtc
        self.version = nvrtc.version
        self.label = "nvrtc{}.{}".format(*nvrtc.version)

    def compile(self, spec: KernelSpec, sources: Sources) -> Cubin:
        flags = options(spec)
        if self.version >= _NVRTC_CACHES:
            flags.append(_NVRTC_NO_CACHE)
        try:
            built = self.nvrtc.compile(sources.name, sources.text, sources.headers, flags)
        except NvrtcError as error:
            raise _failure(spec, self.label, error.log or str(error)) from None
        # Two builds of a kernel give the same words.
        words = [line for line in built.log.splitlines() if "Compile time" not in line]
        return Cubin(built.image, "\n".join(words))


def _failure(spec: KernelSpec, label: str, log: str) -> KernelBuildError:
    return KernelBuildError(f"Kernel {spec.id} does not compile with {label}.", log)
