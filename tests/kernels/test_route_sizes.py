# SPDX-License-Identifier: Apache-2.0
"""What sparge/route_shared.py counts of route's shared memory is what the kernel has."""

from __future__ import annotations

import re

import pytest
import torch

from sparge import route_shared
from sparge.errors import Unsupported
from sparge.kernels.device import Capability
from sparge.kernels.source import find_csrc
from sparge.kernels.spec import ARCHS, HEAD_DIMS, KernelSpec
from sparge.route_shared import RouteShared
from sparge.workspace import CallShape

OUTPUTS = (find_csrc() / "route" / "outputs.cuh").read_text()
KEY_STEP = int(re.findall(r"constexpr int kKeyStep = (\d+);", OUTPUTS)[0])


@pytest.mark.parametrize(
    ("pattern", "counted"),
    [
        (r"constexpr int kMaxRows = (\d+);", route_shared.MAX_ROWS),
        (r"constexpr int kPitch = 4 \* kWarpSize \+ (\d+);", route_shared.PADDING),
    ],
)
def test_the_source_says_so(pattern: str, counted: int):
    text = (find_csrc() / "route" / "product.cuh").read_text()
    assert [int(found) for found in re.findall(pattern, text)] == [counted]


@pytest.mark.parametrize(
    "spec", [KernelSpec("route", "sm_90a", size) for size in HEAD_DIMS], ids=lambda spec: spec.id
)
def test_the_compiled_kernel_declares_no_more(spec: KernelSpec, pack_cubin):
    report = pack_cubin(spec).report
    assert report is not None
    beside = 2304  # candidates and facts of query blocks
    assert 0 < report.static_shared - route_shared.vector_bytes(spec.head_dim) <= beside
    widest = route_shared.vector_bytes(max(HEAD_DIMS)) + beside
    assert report.static_shared <= route_shared.STATIC_BYTES == widest


@pytest.mark.parametrize("key_blocks", [1, 8, 64, 279, 512, 700, 1182, 1861])
def test_pairs_of_four_rows_of_scores_lie_in_all_banks(key_blocks: int):
    pitch = route_shared.score_pitch(key_blocks)
    assert pitch >= -(-key_blocks // KEY_STEP) * KEY_STEP, "weights come in whole steps"
    assert len({(row * pitch + at) % 32 for row in range(4) for at in range(8)}) == 32


@pytest.mark.parametrize("with_pools", [False, True], ids=["scores", "pools"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_launch_asks_for_what_there_is_and_wastes_no_row(
    arch: str, with_pools: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(route_shared, "capabilities", lambda device: Capability(True, "", arch))

    def of(key_blocks: int, head_dim: int) -> RouteShared:
        shape = CallShape(1, 1, 1, 64, 64 * key_blocks, head_dim)
        return RouteShared.of(shape, with_pools, torch.device("cuda"))

    left = ARCHS[arch].shared_limit - route_shared.STATIC_BYTES
    for head_dim in HEAD_DIMS:
        rows, key_blocks = route_shared.MAX_ROWS, 0
        while rows:
            key_blocks += 101
            # Scores, room for errors beside them, and a byte a key block.
            of_row = 4 * route_shared.score_pitch(key_blocks) * (2 if with_pools else 1)
            try:
                found = of(key_blocks, head_dim)
            except Unsupported as refused:
                assert of_row + key_blocks > left
                assert f"{64 * key_blocks} keys" in refused.reason
                break
            assert found.rows * of_row + key_blocks <= found.nbytes <= left, key_blocks
            assert 0 < found.rows <= rows, "more key blocks leave room for fewer query blocks"
            rows = found.rows
            if rows < route_shared.MAX_ROWS:
                assert (rows + 1) * of_row + key_blocks > left, "one more would have fit"
