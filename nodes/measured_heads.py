# SPDX-License-Identifier: Apache-2.0
"""Knowledge about heads of a run in an auto mode, and the part of it that one forward pass uses.

Conditionings that make calls of one shape share their choices, measured on all of them: ComfyUI may
compute cond and uncond in one batch or one by one, as memory allows, and the choices must not
depend on it. Where the shapes differ (Mochi's prompts do) so do the choices.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..sparge import HeadBudget, SparsePolicy, TokenOrder
from ..sparge.calibrate import Aim, Profile, Table
from .attention_call import AttentionCall
from .exact_attention import ExactResult
from .families import TokenLayout
from .head_table import HeadTable, Shape
from .host import untracked_allocations
from .passes import PassFacts
from .worth import affordable

#: Reason of a dense call inside the window: its pass is dense only to be measured.
MEASURING = "measuring"
#: Number of layers of a model that does not show how many it has, of a shape that no pass had
#: before.
USUAL_LAYERS = 40
#: Conditioning under which profiles hold what all of them share.
SHARED = "shared"


@dataclass(frozen=True, eq=False)
class Plan:
    """Plan of a sparse call: token order and head settings."""

    table: HeadTable
    budget: HeadBudget
    order: TokenOrder | None


class MeasuredHeads:
    """Tables of one run, by device, model and shape."""

    def __init__(
        self,
        aim: Aim,
        profile: Profile | None,
        note: Callable[[str], None],
        dense_steps: int,
        sparse_steps: int | None,
    ) -> None:
        """Starts a run. dense_steps, sparse_steps: as in `SigmaWindow`."""
        self.aim = aim
        self._profile, self._note = profile, note
        self._dense_steps, self._sparse_steps = dense_steps, sparse_steps
        self._tables: dict[tuple[torch.device, int, Shape], HeadTable] = {}
        self._met: set[tuple[torch.device, int, Shape]] = set()
        self._layers: dict[tuple[torch.device, int, Shape], int] = {}
        self._lock = threading.Lock()

    def begin(
        self, layout: TokenLayout, policy: SparsePolicy, device: torch.device, facts: PassFacts
    ) -> HeadPass:
        """Begins a pass: makes the tables that it may need, the rest as in `HeadTable.begin_pass`.
        policy: as the device runs it."""
        tables = {
            shape: self._table(shape, layout, policy, device, facts.which)
            for shape in self._shapes(layout, device, facts.which)
        }
        for table in tables.values():
            table.begin_pass(facts)
        return HeadPass(self, device, layout, policy, facts, tables)

    def end(self) -> None:
        """Gives back what tables share with other runs on the devices."""
        for table in self._tables.values():
            table.shape.forget_copies()

    def meet(
        self,
        shape: Shape,
        layout: TokenLayout,
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
        with untracked_allocations():
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
    def frozen(self) -> list[HeadTable]:
        return [table for table in self._tables.values() if table.choices is not None]

    @property
    def frozen_of_sampled(self) -> list[HeadTable]:
        """Tables of the model that is sampled, and of no other beside it."""
        return [
            table
            for (_, which, _), table in self._tables.items()
            if which == 0 and table.choices is not None
        ]

    def _shapes(self, layout: TokenLayout, device: torch.device, which: int) -> Iterable[Shape]:
        with self._lock:
            shapes = {shape for *place, shape in self._met if place == [device, which]}
        if layout.heads is not None:
            shapes |= {
                Shape(grid.tokens, layout.heads, grid, layout.rows) for grid in layout.expected
            }
        return shapes

    def _table(
        self,
        shape: Shape,
        layout: TokenLayout,
        policy: SparsePolicy,
        device: torch.device,
        which: int,
    ) -> HeadTable:
        with self._lock:
            table = self._tables.get((device, which, shape))
            if table is None:
                seen = self._layers.get((device, which, shape))
                afford = partial(
                    affordable,
                    layers=layout.blocks or seen or layout.layers or USUAL_LAYERS,
                    dense_steps=self._dense_steps,
                    sparse_steps=self._sparse_steps,
                )
                table = HeadTable(shape, layout.rows, self.aim, policy, device, afford)
                self._tables[device, which, shape] = table
                if which == 0:  # the profile is of the model that is sampled
                    self._use_profile(table)
            return table

    def _use_profile(self, table: HeadTable) -> None:
        if self._profile is None:
            return
        shape = table.shape
        wanted = table_of(shape)
        found = self._profile.nearest(wanted, table.rows, shape.heads)
        if found is None:
            self._note(
                f"The profile has nothing for {shape.tokens:,} tokens of {shape.heads} heads, so "
                "this run measures them"
            )
            return
        measured, choices = found
        table.use_profile(choices)
        if measured.tokens != wanted.tokens:
            self._note(
                f"The profile was measured with {measured.text:,} tokens of text and is used for "
                f"{wanted.text:,}"
            )


def table_of(shape: Shape) -> Table:
    """Table of a profile that holds the choices of a shape."""
    return Table(SHARED, shape.tokens, shape.grid)


@dataclass(frozen=True, eq=False)
class HeadPass:
    """View of the tables by one forward pass."""

    heads: MeasuredHeads
    device: torch.device
    layout: TokenLayout
    policy: SparsePolicy
    facts: PassFacts
    tables: dict[Shape, HeadTable]
    calls: Counter[Shape] = field(default_factory=Counter)

    def plan(self, call: AttentionCall, tokens: int, row: int, exact: ExactResult) -> Plan | str:
        """Plan of a sparse call of a layer, or the reason why it is dense.

        A dense call is measured while its table is open, which takes its exact result. Never waits
        but to make a table.
        """
        grid = self.layout.sequence(tokens)
        shape = Shape(tokens, call.head_count, grid, self.layout.rows)
        self.calls[shape] += 1
        table = self.tables.get(shape)
        if table is None:
            table = self.heads.meet(shape, self.layout, self.policy, self.device, self.facts)
            if table is None:
                return self.facts.why_dense or MEASURING
            self.tables[shape] = table
        if table.choices is None:
            table.sample(row, call, exact)
            return self.facts.why_dense or table.refusal(row) or MEASURING
        if self.facts.why_dense is not None:
            return self.facts.why_dense
        budget = table.decide(row, call)
        if isinstance(budget, str):
            return budget
        return Plan(table, budget, table.order(self.facts.step))

    def end(self) -> None:
        """Ends the pass for the host. Never waits."""
        self.heads.count_layers(self.device, self.facts.which, self.calls)
        for table in self.tables.values():
            table.end_pass()

    def probe(self, plan: Plan, row: int, call: AttentionCall, out: Tensor) -> None:
        plan.table.probe_call(row, call, out)
