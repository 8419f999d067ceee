# SPDX-License-Identifier: Apache-2.0
"""How blocks are shared out over the thread blocks of the quantize kernel."""

from __future__ import annotations

from dataclasses import dataclass

from .plan.blocks import block_count
from .workspace import CallShape

#: Key or value blocks of a head that a thread block takes one after another, at most: with sixteen
#: no shape gains, with fewer a thread block's own cost weighs more (csrc/quantize.cu, Tried).
LONGEST_RUN = 8
#: Thread blocks that a multiprocessor has its share of, at least: CogVideoX-2B, which has 39 in
#: runs of four, is a fifth slower in runs of sixteen, which leave ten.
LEAST_THREAD_BLOCKS = 32
LONGEST_AXIS = 65535  # of a grid, but for the first


@dataclass(frozen=True)
class QuantizeGrid:
    """What a launch asks for, and what the kernel is told of it."""

    key_run: int
    """Key or value blocks that a thread block takes."""
    query_run: int
    """Query blocks, likewise: half as many, as they are twice as long."""
    key_runs: int
    """Of a head."""
    size: tuple[int, int, int]
    """(batch x KV heads, turns, turns), turns in two axes: one is too short for long sequences."""

    @classmethod
    def of(
        cls, shape: CallShape, multiprocessors: int, *, with_values: bool, with_queries: bool
    ) -> QuantizeGrid:
        tensors = 2 if with_values else 1
        query_heads = shape.heads // shape.kv_heads if with_queries else 0  # of each KV head
        turns = tensors * shape.key_blocks + query_heads * shape.query_blocks
        heads = shape.batch * shape.kv_heads
        share = heads * turns / (LEAST_THREAD_BLOCKS * multiprocessors)
        run = next(run for run in (LONGEST_RUN, LONGEST_RUN // 2, 1) if run <= max(1, share))
        return cls.of_runs(shape, tensors, query_heads, run, max(1, run // 2))

    @classmethod
    def of_runs(
        cls, shape: CallShape, tensors: int, query_heads: int, key_run: int, query_run: int
    ) -> QuantizeGrid:
        key_runs = block_count(shape.key_blocks, key_run)
        turns = tensors * key_runs + query_heads * block_count(shape.query_blocks, query_run)
        size = (
            shape.batch * shape.kv_heads,
            min(turns, LONGEST_AXIS),
            block_count(turns, LONGEST_AXIS),
        )
        return cls(key_run, query_run, key_runs, size)
