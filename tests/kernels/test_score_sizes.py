# SPDX-License-Identifier: Apache-2.0
"""What sparge/launch_score.py counts of the score kernel's shared memory is what the kernel has."""

from __future__ import annotations

import re

import pytest

from sparge import launch_score
from sparge.kernels.source import find_csrc
from sparge.kernels.spec import ARCHS, HEAD_DIMS, RELEASE_ARCHS, KernelSpec
from sparge.workspace import CallShape

MOCHI = CallShape(1, 6, 6, 512, 704 * 64, 128)


@pytest.mark.parametrize(
    ("source", "pattern", "counted"),
    [
        ("place.cuh", r"constexpr int kMaxRows = (\d+);", launch_score._MOST_ROWS),
        ("buckets.cuh", r"constexpr int kStep = (\d+);", launch_score._STEP),
    ],
)
def test_the_source_says_so(source: str, pattern: str, counted: int):
    text = (find_csrc() / "score" / source).read_text()
    assert [int(found) for found in re.findall(pattern, text)] == [counted]


@pytest.mark.parametrize(
    "spec", [KernelSpec("score", "sm_90a", size) for size in HEAD_DIMS], ids=lambda spec: spec.id
)
def test_the_compiled_kernel_declares_no_more(spec: KernelSpec, pack_cubin):
    report = pack_cubin(spec).report
    assert report is not None
    assert 0 < report.static_shared <= launch_score._STATIC_SHARED


def test_sixteen_rows_fit_at_mochi_on_hopper():
    limit = ARCHS["sm_90a"].shared_limit - launch_score._STATIC_SHARED
    assert launch_score.shared_bytes(MOCHI, 6, 16) <= limit


@pytest.mark.parametrize("arch", RELEASE_ARCHS)
def test_eight_thousand_key_blocks_fit_everywhere(arch: str):
    limit = ARCHS[arch].shared_limit - launch_score._STATIC_SHARED
    for size in HEAD_DIMS:
        shape = CallShape(1, 1, 1, 512, 8000 * 64, size)
        assert launch_score.shared_bytes(shape, 6, 1) <= limit
