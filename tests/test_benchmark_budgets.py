# SPDX-License-Identifier: Apache-2.0
"""The cases whose times are compared do the same amount of work, each in its own way."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.budgets import cases, in_turns, ranked_share, results
from benchmarks.shapes import SHAPES
from sparge import AttentionStats, TokenGrid, grid_order
from sparge.common.metrics import rel_l2
from sparge.tune import Workload

GRID = TokenGrid(10, 16, 18, suffix=40)
DENSITY = 0.2


def test_all_cases_run_at_one_density(generator: torch.Generator) -> None:
    qkv = tuple(torch.randn(1, 4, GRID.tokens, 32, generator=generator) for _ in "qkv")
    q, k, v = qkv
    densities, outputs = [], []
    for case in cases(GRID, 4, DENSITY, "cpu"):
        stats = AttentionStats("cpu")
        outputs.append(case.attend((q, k, v), stats=stats))
        densities.append(stats.density)
    assert all(abs(density - DENSITY) < 0.01 for density in densities), "text included"
    for index, one in enumerate(outputs):
        for other in outputs[:index]:
            assert rel_l2(one, other) > 0.01, "a case of its own"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("density", [0.1, 0.2, 0.5, 1.0])
def test_a_call_keeps_the_density_that_is_asked_for(name: str, density: float) -> None:
    """But for half a step of attend, and with text and a step at least."""
    order = grid_order(SHAPES[name].grid)
    kept = Workload(order).density([int(ranked_share(order, density) * order.key_blocks), 1])
    wanted = max(density, float(kept[1]))
    assert kept[0] == pytest.approx(wanted, abs=0.0 if density == 1 else 1.001 / order.key_blocks)


def test_budgets_and_raster_order_keep_the_same_blocks(generator: torch.Generator) -> None:
    """However few are asked for, and with an odd number of blocks of text."""
    for suffix, density in [(0, 0.01), (40, 0.1), (170, 0.1)]:
        grid = TokenGrid(10, 16, 18, suffix=suffix)
        q, k, v = torch.randn(3, 1, 1, grid.tokens, 16, generator=generator)
        raster, cubes = (AttentionStats("cpu") for _ in range(2))
        for case, stats in zip(cases(grid, 1, density, "cpu"), (raster, cubes), strict=False):
            case.attend((q, k, v), stats=stats)
        assert raster.blocks_kept == cubes.blocks_kept


@pytest.mark.parametrize("name", SHAPES)
def test_grids_are_those_of_the_shapes(name: str) -> None:
    assert SHAPES[name].grid.tokens == SHAPES[name].tokens


def test_no_case_is_always_the_first() -> None:
    ran: list[str] = []
    works = {name: partial(ran.append, name) for name in "abc"}

    def ms(work) -> float:
        """The first of a round is fast, the last slow."""
        work()
        return (1.0, 2.0, 6.0)[(len(ran) - 1) % 3]

    assert in_turns(works, ms) == dict.fromkeys("abc", 2.0)
    assert "".join(ran) == "abcbcacab"


def test_rows_of_an_h200_have_a_file_of_their_own() -> None:
    assert results("NVIDIA H200").name == "h200_budgets.jsonl"
    assert results("NVIDIA H100 80GB HBM3").name == "new_budgets.jsonl"
