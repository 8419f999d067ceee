# SPDX-License-Identifier: Apache-2.0
"""Small kernels of this folder: compiled by NVRTC, launched through the driver."""

from __future__ import annotations

from pathlib import Path

from sparge.kernels.device import compiler
from sparge.kernels.driver import Kernel
from sparge.kernels.source import read_sources

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, so that sources reach csrc
FOLDER = "benchmarks/ceilings"
ARCH = "sm_90a"
_OPTIONS = (f"--gpu-architecture={ARCH}", "-DSPARGE_ARCH=90", "-std=c++17", "-default-device")


def image(name: str, **defines: int) -> bytes:
    """The cubin of `<name>.cu`; needs no GPU. Raises NvrtcError with the compiler's log."""
    sources = read_sources(f"{FOLDER}/{name}", ROOT)
    options = [*_OPTIONS, *(f"-D{key}={value}" for key, value in defines.items())]
    return compiler().compile(sources.name, sources.text, sources.headers, options).image


def load(name: str, **defines: int) -> Kernel:
    """The kernel on the current GPU; its `extern "C"` name is the file's."""
    import torch

    return Kernel(image(name, **defines), name, torch.cuda.current_device())
