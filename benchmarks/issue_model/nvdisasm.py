# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's disassembler: where it is, which release, and the SASS of a cubin."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_MISSING = (
    "nvdisasm is missing: pip install nvidia-cuda-nvdisasm, or put the CUDA toolkit's bin on PATH."
)


class NvdisasmMissingError(RuntimeError):
    """Says what to install."""


def program() -> str:
    """The one on PATH, else that of the installed wheel. Raises NvdisasmMissingError."""
    found = shutil.which("nvdisasm")
    if found is None:
        found = next((str(path) for path in _of_wheel()), None)
    if found is None:
        raise NvdisasmMissingError(_MISSING)
    return found


def release() -> tuple[int, int]:
    """CUDA release that it belongs to. Raises NvdisasmMissingError."""
    told = _run([program(), "--version"])
    number = re.search(r"release (\d+)\.(\d+)", told)
    if number is None:
        raise NvdisasmMissingError(f"nvdisasm does not tell its release: {told!r}")
    return int(number[1]), int(number[2])


def disassemble(image: bytes) -> str:
    """SASS of a cubin. Raises NvdisasmMissingError, ValueError where it refuses the image."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(image)
        try:
            return _run([program(), "-c", str(cubin)])
        except subprocess.CalledProcessError as error:
            raise ValueError(f"nvdisasm refuses the cubin: {error.stderr.strip()}") from None


def _of_wheel() -> list[Path]:
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package else None
    return [
        path
        for folder in folders or ()
        for path in sorted(Path(folder).glob("*/bin/nvdisasm*"))
        if path.stem == "nvdisasm"
    ]


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
