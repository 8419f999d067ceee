# SPDX-License-Identifier: Apache-2.0
"""How much of a call the score kernel serves at once, by the sizes that its cubin names."""

from __future__ import annotations

import pytest

from sparge.kernels.cubin import read_sizes, read_static_shared
from sparge.kernels.params import ScoreSizes
from sparge.kernels.spec import ARCHS, HEAD_DIMS, RELEASE_ARCHS, KernelSpec
from sparge.stages.score import shared_bytes
from sparge.stages.workspace import CallShape

SPECS = [KernelSpec("score", "sm_90a", size) for size in HEAD_DIMS]
MOCHI = CallShape(1, 6, 6, 512, 704 * 64, 128)


def room_and_sizes(image: bytes, arch: str) -> tuple[int, ScoreSizes]:
    sizes = read_sizes(image, "score")
    assert isinstance(sizes, ScoreSizes)
    return ARCHS[arch].shared_limit - read_static_shared(image, "score"), sizes


@pytest.mark.parametrize("spec", SPECS[1:], ids=lambda spec: spec.id)
def test_sixteen_rows_fit_at_mochi_on_hopper(spec: KernelSpec, pack_cubin):
    room, sizes = room_and_sizes(pack_cubin(spec).image, spec.arch)
    assert sizes.rows == 16
    assert shared_bytes(MOCHI, 6, sizes.rows, sizes) <= room


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
@pytest.mark.parametrize("arch", RELEASE_ARCHS)
def test_eight_thousand_key_blocks_fit_everywhere(arch: str, spec: KernelSpec, pack_cubin):
    room, sizes = room_and_sizes(pack_cubin(spec).image, arch)
    shape = CallShape(1, 1, 1, 512, 8000 * 64, spec.head_dim)
    assert shared_bytes(shape, 6, 1, sizes) <= room
