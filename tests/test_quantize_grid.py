# SPDX-License-Identifier: Apache-2.0
"""Runs of blocks that quantize takes: long where many thread blocks are left, and every block in
one of them."""

from __future__ import annotations

import pytest

from sparge import Unsupported
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


@pytest.mark.parametrize("with_queries", [False, True])
@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        CallShape(2, 2048, 2, 1_000_000, 64 * 1000, 128),
        CallShape(1, LONGEST_AXIS - 2, 1, 1000, 1000, 64),
        CallShape(1, 1, 1, 30_000_000, 64, 64),
        CallShape(1, 6, 2, 64 * 21, 64 * 21, 64),
    ],
)
def test_runs_hold_every_block_once_and_fit_the_grid(shape, with_values, with_queries):
    found = grid_of(shape, with_values, with_queries)
    assert found.runs <= LONGEST_AXIS and found.heads == shape.batch * shape.kv_heads
    key_runs = -(-shape.key_blocks // found.key_run)
    query_runs = -(-shape.query_blocks // found.query_run) if with_queries else 0
    group = shape.heads // shape.kv_heads
    assert found.key_runs == key_runs
    assert found.runs == (1 + with_values) * key_runs + group * query_runs


def test_more_heads_of_one_key_head_than_an_axis_are_refused():
    with pytest.raises(Unsupported, match="65534 query heads share 1 key heads"):
        grid_of(CallShape(1, LONGEST_AXIS - 1, 1, 10, 10, 64))
