# SPDX-License-Identifier: Apache-2.0
"""Heads of one sampling run: measured in its last dense step, chosen, measured again.

Conditionings that make calls of one shape share their settings, measured on all of them: a host may
compute cond and uncond in one batch or one by one, as memory allows, and the settings must not
depend on it. Where the shapes differ (Mochi's prompts do) so do the settings.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch

from ..policy import SparsePolicy
from .aim import Aim
from .facts import Layout, PassFacts
from .head_table import HeadTable
from .records import Untracked
from .shape import Shape
from .ways import RunLength, Ways

#: Layers of a model that does not show how many it has, of a shape that no pass had before.
USUAL_LAYERS = 40


class HeadTables:
    """Tables of one run, by device, model and shape."""

    def __init__(
        self,
        aim: Aim,
        sparse_steps: int | None,
        untracked: Untracked,
        ways: Ways,
    ) -> None:
        """sparse_steps: number of those that come after measuring; None where that is not known.
        untracked: around allocations inside a call that other calls do without."""
        self.aim = aim
        self._untracked, self._ways = untracked, ways
        self._sparse_steps = sparse_steps
        self._tables: dict[tuple[torch.device, int, Shape], HeadTable] = {}
        self._met: set[tuple[torch.device, int, Shape]] = set()
        self._layers: dict[tuple[torch.device, int, Shape], int] = {}
        self._lock = threading.Lock()

    def begin(
        self, layout: Layout, policy: SparsePolicy, device: torch.device, facts: PassFacts
    ) -> dict[Shape, HeadTable]:
        """Tables that a pass may need, by shape; the rest as in `HeadTable.begin_pass`.

        policy: as the device runs it.
        """
        tables = {
            shape: self._table(shape, layout, policy, device, facts.which)
            for shape in self._shapes(layout, device, facts.which)
        }
        for table in tables.values():
            table.begin_pass(facts)
        return tables

    def end(self) -> None:
        """Gives back what tables share with other runs on the devices."""
        for table in self._tables.values():
            table.shape.forget_copies()

    def meet(
        self,
        shape: Shape,
        layout: Layout,
        policy: SparsePolicy,
        device: torch.device,
        facts: PassFacts,
    ) -> HeadTable | None:
        """Remembers a shape that no pass expected, so that the next one has a table for it.

        A pass that is to be measured itself gets one now, inside its first call: where one step
        alone is dense, the next would have to be dense as well.
        """
        with self._lock:
            self._met.add((device, facts.which, shape))
        if facts.why_dense is not None and not facts.is_last_dense:
            return None
        with self._untracked():
            table = self._table(shape, layout, policy, device, facts.which)
            table.begin_pass(facts)
        return table

    def count_layers(self, device: torch.device, which: int, calls: Mapping[Shape, int]) -> None:
        """Counts calls of each shape where a pass ends, one a layer."""
        with self._lock:
            for shape, count in calls.items():
                key = device, which, shape
                self._layers[key] = max(count, self._layers.get(key, 0))

    @property
    def chosen(self) -> list[HeadTable]:
        return [table for table in self._tables.values() if table.is_chosen]

    def _shapes(self, layout: Layout, device: torch.device, which: int) -> Iterable[Shape]:
        with self._lock:
            shapes = {shape for *place, shape in self._met if place == [device, which]}
        if layout.heads is not None:
            shapes |= {
                Shape(grid.tokens, layout.heads, grid, layout.ranks) for grid in layout.expected
            }
        return shapes

    def _table(
        self,
        shape: Shape,
        layout: Layout,
        policy: SparsePolicy,
        device: torch.device,
        which: int,
    ) -> HeadTable:
        with self._lock:
            table = self._tables.get((device, which, shape))
            if table is None:
                seen = self._layers.get((device, which, shape))
                layers = layout.blocks or seen or layout.layers or USUAL_LAYERS
                run = RunLength(layers, self._sparse_steps)
                table = HeadTable(
                    shape,
                    layout.rows,
                    self.aim,
                    policy,
                    device,
                    self._ways,
                    run,
                    self._untracked,
                )
                self._tables[device, which, shape] = table
            return table
