# SPDX-License-Identifier: Apache-2.0
"""Runs of blocks that quantize takes: long where many thread blocks are left, and every block in
one of them."""

from __future__ import annotations

from collections import Counter

import pytest

from sparge import Unsupported
from sparge.stages import quantize_grid
from sparge.stages.quantize_grid import LONGEST_AXIS, QuantizeGrid
from sparge.stages.workspace import CallShape

H200 = 132  # multiprocessors


def grid_of(shape: CallShape, with_values: bool = True, with_queries: bool = True) -> QuantizeGrid:
    return QuantizeGrid.of(shape, H200, with_values=with_values, with_queries=with_queries)


def square(heads: int, tokens: int, head_dim: int, kv_heads: int | None = None) -> CallShape:
    return CallShape(1, heads, kv_heads or heads, tokens, tokens, head_dim)


def test_runs_are_long_where_many_thread_blocks_are_left():
    runs = {}
    for name, heads, tokens, head_dim in (
        ("wan", 40, 32760, 128), ("cogvideox 2b", 30, 17776, 64), ("flux", 24, 4608, 128),
    ):  # fmt: skip
        grid = grid_of(square(heads, tokens, head_dim))
        runs[name] = (grid.key_run, grid.query_run)
    assert runs == {"wan": (8, 4), "cogvideox 2b": (4, 2), "flux": (1, 1)}


@pytest.mark.parametrize(
    "shape",
    [
        CallShape(2, 2048, 2, 1_000_000, 64 * 1000, 128),
        CallShape(1, LONGEST_AXIS - 2, 1, 1000, 1000, 64),
        CallShape(1, 1, 1, 30_000_000, 64, 64),
    ],
)
def test_calls_that_are_very_long_or_have_many_heads_fit_the_grid(shape: CallShape):
    for with_values in (False, True):
        found = grid_of(shape, with_values)
        assert found.runs <= LONGEST_AXIS
        assert found.key_runs * found.key_run >= shape.key_blocks
        runs = found.runs - (1 + with_values) * found.key_runs
        assert runs // (shape.heads // shape.kv_heads) * found.query_run >= shape.query_blocks


def test_more_heads_of_one_key_head_than_an_axis_are_refused():
    with pytest.raises(Unsupported, match="65534 query heads share 1 key heads"):
        grid_of(CallShape(1, LONGEST_AXIS - 1, 1, 10, 10, 64))


def blocks_of(grid: QuantizeGrid, shape: CallShape, with_values: bool) -> Counter:
    """(tensor, query head of the KV head, block) of every run, as csrc/quantize.cu finds them."""
    kv_runs = (1 + with_values) * grid.key_runs
    group = shape.heads // shape.kv_heads
    found: Counter = Counter()
    for run in range(grid.runs):
        if run < kv_runs:
            tensor = "v" if with_values and run % 2 else "k"
            first = (grid.key_runs - 1 - (run // 2 if with_values else run)) * grid.key_run
            last = min(first + grid.key_run, shape.key_blocks) - 1
            head = 0
        else:
            tensor, head = "q", (run - kv_runs) % group
            first = (run - kv_runs) // group * grid.query_run
            last = min(first + grid.query_run, shape.query_blocks) - 1
        assert first <= last
        found.update((tensor, head, block) for block in range(first, last + 1))
    return found


@pytest.mark.parametrize(("axis", "longest"), [(10, 1), (10, 100), (LONGEST_AXIS, 4)])
@pytest.mark.parametrize("with_queries", [False, True])
@pytest.mark.parametrize("with_values", [False, True])
def test_each_block_has_its_turn(with_values, with_queries, longest, axis, monkeypatch):
    monkeypatch.setattr(quantize_grid, "LONGEST_RUN", longest)
    monkeypatch.setattr(quantize_grid, "LEAST_THREAD_BLOCKS", 0.001)
    monkeypatch.setattr(quantize_grid, "LONGEST_AXIS", axis)
    shape = square(6, 64 * 21, 64, kv_heads=2)
    grid = grid_of(shape, with_values, with_queries)
    assert grid.heads == 2 and grid.runs <= axis and grid.key_run >= longest
    tensors = ["k", "v"] if with_values else ["k"]
    expected = [(tensor, 0, block) for tensor in tensors for block in range(shape.key_blocks)]
    if with_queries:
        expected += [("q", head, block) for head in range(3) for block in range(shape.query_blocks)]
    assert blocks_of(grid, shape, with_values) == Counter(expected)
