# SPDX-License-Identifier: Apache-2.0
"""The shared memory that a launch of route asks for, by the sizes that its cubin names."""

from __future__ import annotations

import pytest

from sparge.errors import Unsupported
from sparge.kernels.cubin import read_sizes, read_static_shared
from sparge.kernels.params import RouteSizes
from sparge.kernels.spec import ARCHS, HEAD_DIMS, KernelSpec
from sparge.stages.route_shared import RouteShared, score_pitch
from sparge.stages.workspace import CallShape

SPECS = [KernelSpec("route", "sm_90a", size) for size in HEAD_DIMS]
each_head_dim = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)


def sizes_of(image: bytes) -> RouteSizes:
    sizes = read_sizes(image, "route")
    assert isinstance(sizes, RouteSizes)
    return sizes


@each_head_dim
@pytest.mark.parametrize("key_blocks", [1, 8, 64, 279, 512, 700, 1182, 1861])
def test_pairs_of_four_rows_of_scores_lie_in_all_banks(
    spec: KernelSpec, key_blocks: int, pack_cubin
):
    sizes = sizes_of(pack_cubin(spec).image)
    pitch, step = score_pitch(key_blocks, sizes), sizes.key_step
    assert pitch >= -(-key_blocks // step) * step, "weights come in whole steps"
    assert len({(row * pitch + at) % 32 for row in range(4) for at in range(8)}) == 32


@each_head_dim
@pytest.mark.parametrize("with_pools", [False, True], ids=["scores", "pools"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_launch_asks_for_what_there_is_and_wastes_no_row(
    arch: str, with_pools: bool, spec: KernelSpec, pack_cubin
):
    image = pack_cubin(spec).image
    sizes = sizes_of(image)
    left = ARCHS[arch].shared_limit - read_static_shared(image, "route")
    rows, key_blocks = sizes.rows, 0
    while rows:
        key_blocks += 101
        # Scores, room for errors beside them, and a byte a key block.
        of_row = 4 * score_pitch(key_blocks, sizes) * (2 if with_pools else 1)
        shape = CallShape(1, 1, 1, 64, 64 * key_blocks, spec.head_dim)
        try:
            found = RouteShared.of(shape, with_pools, sizes, left)
        except Unsupported as refused:
            assert of_row + key_blocks > left
            assert f"{64 * key_blocks} keys" in refused.reason
            break
        assert found.rows * of_row + key_blocks <= found.nbytes <= left, key_blocks
        assert 0 < found.rows <= rows, "more key blocks leave room for fewer query blocks"
        rows = found.rows
        if rows < sizes.rows:
            assert (rows + 1) * of_row + key_blocks > left, "one more would have fit"
