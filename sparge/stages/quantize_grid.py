# SPDX-License-Identifier: Apache-2.0
"""Distribution of blocks over the thread blocks of the quantize kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ..blocks import block_count
from ..errors import Unsupported
from .workspace import CallShape

#: Most key or value blocks of a head that a thread block takes in turn: more gain nothing, with
#: fewer a thread block's own cost weighs more (docs/experiments.md, "Runs of blocks").
LONGEST_RUN = 8
#: Least number of thread blocks a multiprocessor, or nearly so: runs that leave fewer cost time.
LEAST_THREAD_BLOCKS = 32
LONGEST_AXIS = 65535  # limit of a grid's axes, but for the first


@dataclass(frozen=True)
class QuantizeGrid:
    """Grid of a launch, and the numbers that the kernel is told of it."""

    heads: int
    """Key heads in all batches: the first axis."""
    runs: int
    """Runs of key, value and query blocks of each head: the second axis."""
    key_run: int
    """Key or value blocks that a thread block takes."""
    query_run: int
    """Query blocks that a thread block takes: half as many, as they are twice as long."""
    key_runs: int
    """Runs of key blocks of a head."""

    @classmethod
    def of(cls, shape: CallShape, multiprocessors: int, *, with_queries: bool) -> QuantizeGrid:
        blocks = 2 * shape.kv_heads * shape.key_blocks + shape.heads * shape.query_blocks
        share = shape.batch * blocks / (LEAST_THREAD_BLOCKS * multiprocessors)
        run = next(run for run in (LONGEST_RUN, LONGEST_RUN // 2, 1) if run <= max(1, share))
        grid = cls.of_runs(shape, run, with_queries)
        longest = max(shape.key_blocks, 2 * shape.query_blocks)
        while grid.runs > LONGEST_AXIS and run < longest:  # millions of tokens, or of queries
            run *= 2
            grid = cls.of_runs(shape, run, with_queries)
        if grid.runs > LONGEST_AXIS:
            raise Unsupported(
                f"{shape.heads} query heads share {shape.kv_heads} key heads; up to "
                f"{LONGEST_AXIS - 2} may share one: serve fewer heads at a time.",
                "own",
            )
        return grid

    @classmethod
    def of_runs(cls, shape: CallShape, key_run: int, with_queries: bool) -> QuantizeGrid:
        query_run, key_runs = max(1, key_run // 2), block_count(shape.key_blocks, key_run)
        runs = 2 * key_runs
        if with_queries:
            group = shape.heads // shape.kv_heads
            runs += group * block_count(shape.query_blocks, query_run)
        return cls(shape.batch * shape.kv_heads, runs, key_run, query_run, key_runs)
