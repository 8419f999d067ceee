# SPDX-License-Identifier: Apache-2.0
"""Runs of blocks that quantize takes: long where many thread blocks are left, and every block in
one of them."""

from __future__ import annotations

import pytest

from sparge import quantize_grid
from sparge.quantize_grid import QuantizeGrid
from sparge.workspace import CallShape

H200 = 132  # multiprocessors


def square(heads: int, tokens: int, head_dim: int, kv_heads: int | None = None) -> CallShape:
    return CallShape(1, heads, kv_heads or heads, tokens, tokens, head_dim)


@pytest.mark.parametrize(
    ("shape", "runs"),
    [
        (square(40, 32760, 128), (8, 4)),
        (square(24, 44776, 128), (8, 4)),
        (square(30, 17776, 64), (4, 2)),
        (square(24, 4608, 128), (1, 1)),
        (square(1, 1, 64), (1, 1)),
    ],
    ids=["wan", "mochi", "cogvideox 2b", "flux", "one token"],
)
def test_a_gpu_is_left_with_many_thread_blocks(shape: CallShape, runs: tuple[int, int]):
    found = QuantizeGrid.of(shape, H200, with_values=True, with_queries=True)
    assert (found.key_run, found.query_run) == runs


@pytest.mark.parametrize("axis", [3, 65535])
@pytest.mark.parametrize("with_queries", [False, True])
@pytest.mark.parametrize("with_values", [False, True])
def test_each_block_has_its_turn(
    with_values: bool, with_queries: bool, axis: int, monkeypatch: pytest.MonkeyPatch
):
    """As csrc/quantize.cu shares out turns."""
    monkeypatch.setattr(quantize_grid, "LONGEST_AXIS", axis)
    shape = square(6, 64 * 21, 64, kv_heads=2)
    tensors, query_heads = 1 + with_values, 3 * with_queries
    found = QuantizeGrid.of_runs(shape, tensors, query_heads, 4, 2)
    heads, *turns = found.size
    assert heads == 2 and turns[0] <= axis
    key_turns = tensors * found.key_runs
    queries = [turn - key_turns for turn in range(turns[0] * turns[1]) if turn >= key_turns]
    blocks = [
        (turn % 3, block)
        for turn in queries
        for block in range(turn // 3 * 2, min(turn // 3 * 2 + 2, shape.query_blocks))
    ]
    every = [(head, block) for head in range(query_heads) for block in range(shape.query_blocks)]
    assert sorted(blocks) == (every if with_queries else [])
    assert found.key_runs * found.key_run >= shape.key_blocks
