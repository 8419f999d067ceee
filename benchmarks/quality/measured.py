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
from sparge.tune import Measurement, Workload, measure_for


@dataclass(frozen=True, eq=False)
class Measured:
    measurement: Measurement
    seen: Mapping[int, set[int]]
    """Query blocks by place of the layer."""

    @classmethod
    def on(cls, calls: Iterable[Call], layers: int, blocks_a_call: int) -> Measured:
        """Measures some query blocks of each call; all calls have one shape.

        Raises:
            ValueError: there is no call of some layer.
        """
        measurement: Measurement | None = None
        seen: dict[int, set[int]] = defaultdict(set)
        for call in calls:
            q, k, v = call.layer.q, call.layer.k, call.layer.v
            if measurement is None:
                measurement = Measurement.begin(
                    layers=layers,
                    heads=call.heads,
                    workload=Workload(grid_order(call.layer.grid)),
                    blocks_a_call=blocks_a_call,
                    measure=measure_for(q.device),
                    device=q.device,
                )
            seen[call.place].update(measurement.next_query_blocks(call.place))
            measurement.add(call.place, q, k, v)
        if measurement is None or len(seen) != layers:
            raise ValueError(f"The measurement saw {len(seen)} layers; {layers} are judged.")
        return cls(measurement, seen)

    def budgets(
        self, mean_density: float, device: torch.device | str = "cpu"
    ) -> list[HeadSettings]:
        """Head settings of each layer, by place; all of them were measured."""
        settings = self.measurement.error_table().choose(mean_density=mean_density)
        measured = [
            head_settings
            for head_settings in settings.of_layers(device)
            if head_settings is not None
        ]
        assert len(measured) == settings.layers
        return measured
