# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a session, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..checks.argument import whole_number
from ..checks.validate import check_inference
from ..common.compiling import untraced
from ..errors import Unsupported
from ..head_settings import HeadSettings
from ..order.grid import TokenOrder
from ..policy import SparsePolicy
from .alike_heads import AlikeHeads
from .call import Call, DenseOnce
from .eight_bit import EightBitDense
from .facts import Layout, PassFacts
from .head_table import HeadTable
from .records import PassRecord, Way
from .shape import Shape
from .tables import HeadTables
from .ways import Choice, Ways

#: Reason of a dense call among sparse steps: its pass is dense only to be measured.
MEASURING = "measuring"
#: Layers whose dense calls in a run's first step are exact, for the run to learn what that takes.
TIMED_LAYERS = (1, 2)


@dataclass(frozen=True, eq=False)
class Plan:
    """Plan of a sparse call."""

    policy: SparsePolicy
    order: TokenOrder | None
    table: HeadTable | None = None
    """Table of its heads; None where all heads are alike."""
    head_settings: HeadSettings | None = None


@dataclass(eq=False)
class _LookAlikes:
    """Facts and plan that sparse calls of a pass share where they look alike."""

    choice: Choice
    policy: SparsePolicy
    shape: Shape
    table: HeadTable | None = None
    """Table of their heads; None where all heads are alike, or before it is asked for."""
    plan: Plan | str | None = None
    """Plan of calls whose heads are all alike, or the reason why they are dense."""
    calls: int = 0


@dataclass(eq=False)
class SessionPass:
    """View of a session by one forward pass."""

    heads: HeadTables | AlikeHeads
    ways: Ways
    device: torch.device
    layout: Layout
    policy: SparsePolicy
    facts: PassFacts
    tables: dict[Shape, HeadTable]
    record: PassRecord
    eight_bit_dense: EightBitDense
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of dense results of `attend` by the reason for them."""
    _choices: dict[Hashable, Choice] = field(default_factory=dict, repr=False)
    _looks: dict[Hashable, _LookAlikes] = field(default_factory=dict, repr=False)

    @untraced
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layout: str = "HND",
        scale: float | None = None,
        exact: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Self-attention of a layer: sparse where its heads are chosen, else dense, and measured.

        q, k, v and the result are (B, H, N, D) for layout "HND", (B, N, H, D) for "NHD". exact
        gives the result of exact attention in that layout; `scaled_dot_product_attention` without
        it.

        Raises:
            ValueError: an argument is none of these, or the batch is not of the pass's prompts.
        """
        layer = whole_number("layer", layer, 0)
        call = Call.of(q, k, v, layout, scale)
        is_of_model = layer < self.layout.rows
        entries, prompts = call.q.shape[0], len(self.facts.conditioning)
        if entries % prompts:
            raise ValueError(
                f"conditioning names {prompts} prompts and the batch has {entries} entries; "
                f"give one number for each entry, say {tuple(range(entries))}."
            )
        compute = partial(self.exact, call, exact or call.exact)
        dense = DenseOnce(compute, partial(self.eight_bit, call, layer))
        try:
            self._check(call)
            if not is_of_model:
                raise Unsupported(f"the model has fewer layers than {layer + 1}")
            out = self.sparse(call, layer, dense)
            if not isinstance(out, str):
                return out
            reason = out
        except Unsupported as refusal:
            if refusal is dense.failure:
                raise
            reason = refusal.reason
        self.reasons[reason] += 1
        self.record.add_dense(layer if is_of_model else None, call.pairs)
        return dense.result()

    def eight_bit(self, call: Call, row: int | None) -> Tensor | None:
        """Result of a call of a layer by 8-bit dense attention; None where it has to be exact. row:
        None where its exact call would not be timed."""
        if call.q.device != self.device or not self._choice(call).eight_bit_dense:
            return None
        if self.facts.step == 0 and row in TIMED_LAYERS and self.record.spans.times(call):
            return None
        # Exact attention may need less memory.
        with (
            suppress(Unsupported, torch.OutOfMemoryError),
            self._timed(Way.EIGHT_BIT, call),
        ):
            return self.eight_bit_dense.attend(call)
        return None

    def exact(self, call: Call, compute: Callable[[], Tensor]) -> Tensor:
        """Exact result of a self-attention call, which the report tells the time of."""
        with self._timed(Way.EXACT, call):
            return compute()

    def _timed(self, way: Way, call: Call) -> AbstractContextManager[None]:
        return self.record.spans.around(way, call, self._choice(call).exact_seconds)

    def _choice(self, call: Call) -> Choice:
        look = call.look
        choice = self._choices.get(look)
        if choice is None:
            choice = self._choices[look] = self.ways.choice(call)
        return choice

    def _check(self, call: Call) -> None:
        """Raises Unsupported for a call that is exact in every step."""
        q, k, v = call.qkv
        if q.device != self.device:
            raise Unsupported(f"tensors on {q.device} in a pass on {self.device}")
        if q.shape[2] != k.shape[2]:
            raise Unsupported("queries and keys differ in number")
        check_inference(q, k, v)

    def sparse(
        self, call: Call, row: int, dense: DenseOnce, ends: tuple[int, int] | None = None
    ) -> Tensor | str:
        """Sparse result of a call of a layer, or the reason why it has to be dense; the rest as in
        `plan`.
        """
        plan = self.plan(call, row, dense, ends)
        if isinstance(plan, str):
            return plan
        stats = self.record.stats_of(row)
        with self._timed(Way.SPARSE, call):
            out = call.sparse(plan.policy, stats, plan.order, plan.head_settings)
        with suppress(torch.OutOfMemoryError):  # the result is there
            self.record.look(row, out)
            self.measure_again(plan, row, call)
        return out

    def plan(
        self, call: Call, row: int, dense: DenseOnce, ends: tuple[int, int] | None = None
    ) -> Plan | str:
        """Plan of a sparse call of a layer, or the reason why it is dense.

        While the heads' settings are not chosen, a dense call is measured, which computes its
        result. Waits only to make a table. ends: numbers of tokens at either end that stay exact,
        where they are not those of the grid.
        """
        looks = self._look_alikes(call, ends)
        looks.calls += 1
        why_dense = self.facts.why_dense
        if isinstance(self.heads, AlikeHeads):
            looks.plan = why_dense or looks.plan or self._plan_of_alike(self.heads, looks)
            return looks.plan
        table = looks.table
        if table is None:
            table = looks.table = self._met(self.heads, looks.shape)
            if table is None:
                return why_dense or MEASURING
        if not table.is_chosen:
            timed = partial(self._timed, Way.MEASURING, call)
            table.measuring.measure(row, call, looks.choice, dense, timed)
            return why_dense or table.refusal(row) or MEASURING
        if why_dense is not None:
            return why_dense
        head_settings = table.decide(row, looks.choice)
        if isinstance(head_settings, str):
            return head_settings
        return Plan(looks.policy, table.order(self.facts.step), table, head_settings)

    def _look_alikes(self, call: Call, ends: tuple[int, int] | None) -> _LookAlikes:
        """Kind of a call, found out at the first one."""
        key = call.look, ends
        looks = self._looks.get(key)
        if looks is None:
            tokens = call.query_tokens
            grid = self.layout.sequence(tokens) if call.k.shape[2] == tokens else None
            prefix, suffix = ends or ((grid.prefix, grid.suffix) if grid else (0, 0))
            policy = replace(self.policy, exact_prefix=prefix, exact_suffix=suffix)
            shape = Shape(tokens, call.head_count, grid, self.layout.ranks)
            looks = self._looks[key] = _LookAlikes(self._choice(call), policy, shape)
        return looks

    def _plan_of_alike(self, heads: AlikeHeads, looks: _LookAlikes) -> Plan | str:
        if reason := heads.slower(looks.choice, looks.policy):
            return reason
        shape = looks.shape
        order = heads.order(shape.grid, shape.ranks, self.facts.step, self.device)
        return Plan(looks.policy, order)

    def _met(self, heads: HeadTables, shape: Shape) -> HeadTable | None:
        table = self.tables.get(shape)
        if table is None:
            table = heads.meet(shape, self.layout, self.policy, self.device, self.facts)
            if table is not None:
                self.tables[shape] = table
        return table

    def end(self) -> None:
        """Ends the pass for the host. Never waits."""
        if isinstance(self.heads, HeadTables):
            calls = Counter[Shape]()
            for looks in self._looks.values():
                calls[looks.shape] += looks.calls
            self.heads.count_layers(self.device, self.facts.which, calls)
        self._looks.clear()  # their plans hold orders on the device
        for table in self.tables.values():
            table.end_pass()

    def measure_again(self, plan: Plan, row: int, call: Call) -> None:
        """Now and then measures the heads of a sparse call again."""
        if plan.table is not None and plan.table.measures_again:
            with self._timed(Way.MEASURING, call):
                plan.table.measure_again(row, call)
