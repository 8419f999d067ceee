# SPDX-License-Identifier: Apache-2.0
"""Places where NVIDIA's run-time compiler may lie: torch brings it, or a wheel, or a CUDA
toolkit.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_WINDOWS = sys.platform == "win32"


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


def builtins_of(library: Path) -> list[Path]:
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
