# SPDX-License-Identifier: Apache-2.0
"""Head settings by the library's own measuring, and the query blocks that it has seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.quality.judge import Call
from sparge.head_settings import HeadSettings
from sparge.order.grid import grid_order
from sparge.policy import SparsePolicy
from sparge.session.choose import Curves
from sparge.session.measure import Candidates, MeasuredCall, Sums, measure, spread_places


@dataclass(frozen=True, eq=False)
class Measured:
    candidates: Candidates
    sums: Sums
    seen: Mapping[int, set[int]]
    """Query blocks by place of the layer."""

    @classmethod
    def on(cls, calls: Iterable[Call], layers: int, blocks_a_call: int) -> Measured:
        """Measures some query blocks of each call; all calls have one shape.

        Raises:
            ValueError: there is no call of some layer.
        """
        candidates, sums = None, Sums()
        seen: dict[int, set[int]] = defaultdict(set)
        for call in calls:
            q, k, v = call.layer.q, call.layer.k, call.layer.v
            order, place = grid_order(call.layer.grid).on(q.device), call.place
            candidates = candidates or Candidates.of(grid_order(call.layer.grid), q.device)
            usable = (~grid_order(call.layer.grid).queries_exact).nonzero().flatten().tolist()
            places = spread_places(len(usable), len(seen[place]) + place, blocks_a_call)
            blocks = [usable[each] for each in places]
            asked = MeasuredCall(q, k, v, q.shape[-1] ** -0.5, order, candidates, blocks)
            sums.add(place, measure(asked), len(blocks))
            seen[place].update(blocks)
        if candidates is None or len(seen) != layers:
            raise ValueError(f"The measurement saw {len(seen)} layers; {layers} are judged.")
        return cls(candidates, sums, seen)

    def budgets(
        self, mean_density: float, device: torch.device | str = "cpu"
    ) -> list[HeadSettings]:
        """Head settings of each layer, by place."""
        curves = Curves.of(self.sums, self.candidates)
        settings = curves.settings(curves.chosen([mean_density]))
        of_step = settings.of_step(0, SparsePolicy(), self.candidates.orders)
        return [of_step(layer).on(device) for layer in range(len(self.seen))]
