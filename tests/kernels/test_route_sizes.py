# SPDX-License-Identifier: Apache-2.0
"""What sparge/launch.py counts of route's shared memory is what the kernel has."""

from __future__ import annotations

import re

import pytest

from sparge import launch
from sparge.kernels.source import find_csrc
from sparge.kernels.spec import HEAD_DIMS, KernelSpec


@pytest.mark.parametrize(
    ("pattern", "counted"),
    [
        (r"constexpr int kMaxRows = (\d+);", launch._MAX_ROUTE_ROWS),
        (r"constexpr int kPitch = kHeadDim \+ (\d+);", launch._ROUTE_PADDING),
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
    assert 0 < report.static_shared - launch._route_vector_bytes(spec.head_dim) <= beside
    widest = launch._route_vector_bytes(max(HEAD_DIMS)) + beside
    assert report.static_shared <= launch._STATIC_ROUTE_SHARED == widest
