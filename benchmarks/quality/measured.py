# SPDX-License-Identifier: Apache-2.0
"""Budgets per head by the library's own calibration, and the query blocks that it has seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.quality.judge import Call
from sparge.calibrate import Calibration, CandidateSet, HeadChoices, Workload
from sparge.plan.grid import cube_order


@dataclass(frozen=True, eq=False)
class Measured:
    calibration: Calibration
    seen: list[frozenset[int]]
    """Query blocks of each call; those of other calls where calibration ran on others."""

    @classmethod
    def on(cls, calls: Iterable[Call], count: int, blocks: int) -> Measured:
        """Measure `blocks` query blocks of each of `count` calls of one shape."""
        calibration: Calibration | None = None
        seen: list[frozenset[int]] = []
        for index, call in enumerate(calls):
            if calibration is None:
                calibration = Calibration.begin(
                    layers=count,
                    heads=call.heads,
                    workload=_workload(call),
                    candidates=WithSink() if call.is_causal else CandidateSet(),
                    blocks_a_call=blocks,
                )
            seen.append(frozenset(calibration.next_query_blocks(index)))
            calibration.sample(index, call.layer.q, call.layer.k, call.layer.v)
        if calibration is None or len(seen) != count:
            raise ValueError(f"Calibration saw {len(seen)} calls; {count} are judged.")
        return cls(calibration, seen)

    def choices(self, mean_density: float) -> HeadChoices:
        return self.calibration.freeze(mean_density=mean_density)


class WithSink(CandidateSet):
    """The candidates of a text whose first key block is exact, in every density."""

    def buckets(self, rank: Tensor, valid: Tensor) -> Tensor:
        first = rank[..., :1]
        closed_up = rank - ((first >= 0) & (rank > first)).long()
        bucket = super().buckets(closed_up, valid)
        bucket[..., 0] = 0
        return bucket


def _workload(call: Call) -> Workload:
    if call.layer.grid is None:
        return Workload.of_tokens(call.layer.q.shape[2], call.is_causal)
    return Workload(cube_order(call.layer.grid), call.is_causal)
