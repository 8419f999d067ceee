# SPDX-License-Identifier: Apache-2.0
"""What sparge/launch.py counts of the thread blocks of means is what the kernel expects."""

from __future__ import annotations

import pytest

from sparge.kernels.nvrtc import NvrtcError
from sparge.kernels.source import read_sources
from sparge.kernels.spec import ARCHS, HEAD_DIMS
from sparge.launch import _means_slices


def _compile(compiler, arch: str, head_dim: int, slices: int) -> None:
    sources = read_sources("means")
    text = f'{sources.text}\nstatic_assert(sparge::means::kSlices == {slices}, "slices");\n'
    options = [f"--gpu-architecture={arch}", "-std=c++17", "-default-device"]
    options += [f"-DSPARGE_ARCH={ARCHS[arch].path}", f"-DSPARGE_HEAD_DIM={head_dim}"]
    compiler.nvrtc.compile(sources.name, text, sources.headers, options)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_90"])
def test_slices(compiler, arch: str, head_dim: int) -> None:
    slices = _means_slices(head_dim, arch)
    _compile(compiler, arch, head_dim, slices)
    with pytest.raises(NvrtcError, match="slices"):
        _compile(compiler, arch, head_dim, slices + 1)
