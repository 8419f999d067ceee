# SPDX-License-Identifier: Apache-2.0
"""Compilation of a spec and its sources to a cubin: the one list of options, for NVRTC and for
nvcc."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Protocol

from ..errors import KernelBuildError
from .cubin import Cubin
from .nvrtc import Nvrtc, NvrtcError
from .report import parse_report
from .source import Sources
from .spec import ARCHS, KernelSpec

#: For a profiler that shows our lines add "-lineinfo" here; by default it is absent because it
#: makes the files 3 to 4 times larger (200-600 KB each).
_OPTIONS = ("-std=c++17", "--ptxas-options=-v")
#: Plain constexpr functions are for the device too; each compiler has its own word for that.
_NVRTC_OPTIONS = ("-default-device",)
_NVCC_OPTIONS = ("--expt-relaxed-constexpr",)
#: From this version on NVRTC looks into the driver's cache; what it finds there comes without the
#: assembler's report.
_NVRTC_CACHES = (12, 9)
_NVRTC_NO_CACHE = "--no-cache"


def options(spec: KernelSpec) -> list[str]:
    """Options that both compilers are told."""
    return [f"--gpu-architecture={ARCHS[spec.arch].target}", *_OPTIONS, *spec.defines]


def options_key(spec: KernelSpec) -> str:
    """Changes whenever the options of either compiler do."""
    return " ".join((*options(spec), *_NVRTC_OPTIONS, *_NVCC_OPTIONS))


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
        flags = [*options(spec), *_NVRTC_OPTIONS]
        if self.version >= _NVRTC_CACHES:
            flags.append(_NVRTC_NO_CACHE)
        try:
            built = self.nvrtc.compile(sources.name, sources.text, sources.headers, flags)
        except NvrtcError as error:
            raise _failure(spec, self.label, error.log or str(error)) from None
        return Cubin(built.image, parse_report(built.log))


class NvccCompiler:
    """The toolkit's compiler, to compare with NVRTC; users never need it.

    Raises FileNotFoundError when nvcc is not on PATH.
    """

    def __init__(self) -> None:
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            raise FileNotFoundError("nvcc is not on PATH; leave out --with nvcc to use NVRTC")
        self._nvcc = nvcc
        told = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        release = re.search(r"release (\d+)\.(\d+)", told)
        if release is None:
            raise FileNotFoundError(f"{nvcc} does not tell its version: {told!r}")
        self.version = (int(release[1]), int(release[2]))
        self.label = "nvcc{}.{}".format(*self.version)

    def compile(self, spec: KernelSpec, sources: Sources) -> Cubin:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {sources.name: sources.text, **sources.headers}.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            output = Path(folder, "kernel.cubin")
            flags = ["-cubin", "-I.", *options(spec), *_NVCC_OPTIONS]
            command = [self._nvcc, *flags, "-o", output.name, sources.name]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            log = done.stdout + done.stderr
            if done.returncode:
                raise _failure(spec, self.label, log)
            return Cubin(output.read_bytes(), parse_report(log))


def _failure(spec: KernelSpec, label: str, log: str) -> KernelBuildError:
    return KernelBuildError(f"Kernel {spec.id} does not compile with {label}.", log)
