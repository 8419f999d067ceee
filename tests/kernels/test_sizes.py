# SPDX-License-Identifier: Apache-2.0
"""Shared memory that launches of route and score ask for, by the sizes that their cubins name."""

from __future__ import annotations

from typing import Any

import pytest

from sparge.errors import Unsupported
from sparge.kernels.cubin import read_sizes, read_static_shared
from sparge.kernels.spec import ARCHS, HEAD_DIMS, RELEASE_ARCHS, KernelSpec
from sparge.stages.measuring import shared_bytes
from sparge.stages.route_shared import RouteShared, score_pitch
from sparge.stages.workspace import CallShape


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("with_pools", [False, True], ids=["scores", "pools"])
def test_a_launch_of_route_asks_for_what_there_is_and_wastes_no_row(
    with_pools: bool, head_dim: int, pack_cubin
):
    image = pack_cubin(KernelSpec("route", "sm_90a", head_dim)).image
    sizes: Any = read_sizes(image, "route")
    for limit in {arch.shared_limit for arch in ARCHS.values()}:
        left = limit - read_static_shared(image, "route")
        rows, key_blocks = sizes.rows, 0
        while rows:
            key_blocks += 101
            pitch = score_pitch(key_blocks, sizes)
            assert pitch >= -(-key_blocks // sizes.key_step) * sizes.key_step, "whole steps"
            banks = {(row * pitch + at) % 32 for row in range(4) for at in range(8)}
            assert len(banks) == 32, "pairs of four rows lie in all banks"
            # Scores, room for errors beside them, and a byte a key block.
            of_row = 4 * pitch * (2 if with_pools else 1)
            shape = CallShape(1, 1, 1, 64, 64 * key_blocks, head_dim)
            try:
                found = RouteShared.of(shape, with_pools, sizes, left)
            except Unsupported as refused:
                assert of_row + key_blocks > left
                assert f"{64 * key_blocks} keys" in refused.reason
                break
            assert found.rows * of_row + key_blocks <= found.nbytes <= left, key_blocks
            assert 0 < found.rows <= rows, "more key blocks leave room for fewer query blocks"
            rows = found.rows
            full = rows == sizes.rows
            assert full or (rows + 1) * of_row + key_blocks > left, "one more would have fit"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_score_serves_eight_thousand_key_blocks_and_sixteen_rows_at_mochi(
    head_dim: int, pack_cubin
):
    image = pack_cubin(KernelSpec("score", "sm_90a", head_dim)).image
    sizes: Any = read_sizes(image, "score")
    static = read_static_shared(image, "score")
    least = min(ARCHS[arch].shared_limit for arch in RELEASE_ARCHS)
    shape = CallShape(1, 1, 1, 512, 8000 * 64, head_dim)
    assert static + shared_bytes(shape, 6, 1, sizes) <= least
    if head_dim == 128:
        mochi = CallShape(1, 6, 6, 512, 704 * 64, 128)
        limit = ARCHS["sm_90a"].shared_limit
        assert sizes.rows == 16 and static + shared_bytes(mochi, 6, 16, sizes) <= limit
