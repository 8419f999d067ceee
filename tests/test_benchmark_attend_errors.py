# SPDX-License-Identifier: Apache-2.0
"""Both attend kernels meet the same calls; the portable one is taken only while it is asked for."""

from __future__ import annotations

from benchmarks.attend_errors import DATA, measure_all, portable_attend
from benchmarks.shapes import Shape
from benchmarks.speed_rows import OURS, OURS_BUDGETS
from sparge import TokenGrid
from sparge.kernels import Element
from sparge.kernels.spec import HOPPER_ATTEND, attend_path
from sparge.stages import launch

GRID = TokenGrid(4, 8, 8)


def test_only_within_the_block_calls_take_the_portable_kernel() -> None:
    assert launch.attend_path("sm_90a", Element.INT8_E4M3).entry == HOPPER_ATTEND
    with portable_attend():
        assert launch.attend_path("sm_90a", Element.INT8_E4M3).entry == "attend"
    assert launch.attend_path is attend_path


def test_each_mode_is_measured_with_both() -> None:
    """Both are the same reference on the CPU, whose errors are those of 8 bits."""
    rows = list(measure_all(Shape("small", 2, GRID.tokens, 64, GRID), "cpu", (1.0, 0.5)))
    assert [(row["data"], row["asked_density"], row["mode"]) for row in rows] == [
        (data, density, mode)
        for data in DATA
        for density in (1.0, 0.5)
        for mode in (OURS, OURS_BUDGETS)
    ]
    for row in rows:
        assert row["wgmma_rel_l1"] == row["mma_sync_rel_l1"] > 1e-3
        assert row["wgmma_rel_l2"] == row["mma_sync_rel_l2"]
        if row["mode"] == OURS or row["asked_density"] == 1:
            assert row["wgmma_rel_l2"] < 0.02
