# SPDX-License-Identifier: Apache-2.0
"""Small CUDA sources of our own, and the pack's real kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from sparge.kernels import nvrtc
from sparge.kernels.cubin import Cubin
from sparge.kernels.loader import load_cubin
from sparge.kernels.nvrtc import Nvrtc
from sparge.kernels.spec import ENTRIES, KernelSpec

_ENTRY = """
#include "common/twice.cuh"
struct LaunchInfo { unsigned threads, shared_bytes; };
struct alignas(8) Params { unsigned char bytes[SPARGE_PARAMS_BYTES]; };
extern "C" __device__ const LaunchInfo launch_info = {96, 4096u};
extern "C" __device__ const unsigned launch_sizes[3] = {7, 8, 9};
extern "C" __global__ void ENTRY(const __grid_constant__ Params p) {
  *reinterpret_cast<float* const&>(p.bytes[0]) = twice(SPARGE_HEAD_DIM);
}
"""
_HEADER = "#pragma once\n__device__ inline float twice(float x) { return x + x; }\n"


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    """A source tree with the pack's entries in miniature: 96 threads, 4096 shared bytes each."""
    root = tmp_path / "csrc"
    (root / "common").mkdir(parents=True)
    (root / "common" / "twice.cuh").write_text(_HEADER)
    for entry in ENTRIES:
        (root / f"{entry}.cu").write_text(_ENTRY.replace("ENTRY", entry))
    return root


@pytest.fixture(scope="session")
def compiler() -> Nvrtc:
    return nvrtc.load()


class CountingCompiler(Nvrtc):
    """The real compiler, counting what reaches it."""

    def __init__(self, compiler: Nvrtc) -> None:
        super().__init__(compiler.path)
        self.compiled: list[KernelSpec] = []

    def compile(self, spec, sources) -> Cubin:
        self.compiled.append(spec)
        return super().compile(spec, sources)


@pytest.fixture
def counting(compiler: Nvrtc) -> CountingCompiler:
    return CountingCompiler(compiler)


@pytest.fixture(scope="session")
def pack_cubin() -> Callable[[KernelSpec], Cubin]:
    """The pack's own kernel of a spec, from the user's cache or compiled there."""
    return functools.cache(load_cubin)


@pytest.fixture
def raising() -> Callable[[Exception], Callable]:
    """raising(error): a function that raises it."""

    def raising(error: Exception) -> Callable:
        def fail(*_, **__):
            raise error

        return fail

    return raising
