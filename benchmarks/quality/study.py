# SPDX-License-Identifier: Apache-2.0
"""Study of a data set under every mode: judged rows, head settings, rows of results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean

from benchmarks.quality.data import DataSet
from benchmarks.quality.judge import HeadError, head_errors, summary
from benchmarks.quality.measured import Measured
from benchmarks.quality.modes import Mode, attention, order_of, share_for
from benchmarks.quality.rows import Row
from sparge.head_settings import HeadSettings


class Study:
    """Calls of a data set, the rows that they are judged by, and what a measurement found."""

    def __init__(
        self, data: DataSet, modes: Iterable[Mode], blocks: int, measurement_blocks: int, seed: int
    ) -> None:
        self.data = data
        self._measured: Measured | None = None
        seen: Mapping[int, set[int]] = {}
        if any(mode.measured for mode in modes):
            self._measured = Measured.on(data.measured_calls, data.layers, measurement_blocks)
            if data.measured_calls is data.judged:
                seen = self._measured.seen
        self._tokens = [
            call.drawn(blocks, seed + index, seen.get(call.place, ()))
            for index, call in enumerate(data.judged)
        ]

    def budgets(self, mode: Mode, density: float) -> list[HeadSettings]:
        """Head settings for each call; measured ones share the mean density among all heads of all
        calls."""
        calls = self.data.judged
        device = calls[0].layer.q.device
        if not mode.measured:
            first = calls[0]
            share = share_for(mode, first.operands(mode.cubes), density)
            return [HeadSettings.uniform(call.heads, share).on(device) for call in calls]
        assert self._measured is not None  # the mode is one of those the study was made for
        by_place = self._measured.budgets(density, device)
        return [by_place[call.place] for call in calls]

    def row(self, mode: Mode, density: float) -> Row:
        """Row of errors on the judged rows, which the measurement has not seen."""
        errors: list[HeadError] = []
        densities = []
        budgets = self.budgets(mode, density)
        for call, head_settings, tokens in zip(
            self.data.judged, budgets, self._tokens, strict=True
        ):
            layer = call.layer
            order = order_of(mode, layer.grid, layer.q.device)
            out, reached = attention(mode, *layer[1:4], head_settings, order)
            errors += head_errors(layer.name, out[0, :, tokens], call.truth(tokens))
            densities.append(reached())
        named = {"data": self.data.name, "mode": mode.name, "asked_density": density}
        named |= {"layers": self.data.layers, "density": mean(densities)}
        return named | summary(errors)
