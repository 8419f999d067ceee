# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a session, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..checks.argument import whole_number
from ..checks.validate import check_inference
from ..common.untraced import untraced
from ..errors import Unsupported
from ..head_settings import HeadSettings
from ..order.grid import TokenOrder
from ..policy import SparsePolicy
from .call import Call, Exact, ExactOnce, TensorCall
from .facts import Layout, PassFacts
from .head_table import HeadTable
from .records import PassRecord
from .shape import Shape
from .tables import HeadTables

#: Reason of a dense call among sparse steps: its pass is dense only to be measured.
MEASURING = "measuring"


@dataclass(frozen=True, eq=False)
class Plan:
    """Plan of a sparse call: token order and head settings."""

    table: HeadTable
    head_settings: HeadSettings
    order: TokenOrder | None


@dataclass(eq=False)
class SessionPass:
    """View of the tables by one forward pass."""

    heads: HeadTables
    device: torch.device
    layout: Layout
    policy: SparsePolicy
    facts: PassFacts
    tables: dict[Shape, HeadTable]
    calls: Counter[Shape] = field(default_factory=Counter)
    record: PassRecord | None = None
    """Counters of the calls of `attend`; hosts that begin passes themselves keep their own."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of exact results of `attend` by the reason for them."""

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
        """Self-attention of a layer: sparse where its heads are chosen, else exact, and measured.

        q, k, v and the result are (B, H, N, D) for layout "HND", (B, N, H, D) for "NHD". exact
        gives the result of exact attention in that layout; `scaled_dot_product_attention` without
        it. Passes that `Session.begin_step` began alone have this.
        """
        assert self.record is not None
        layer = whole_number("layer", layer, 0)
        call = TensorCall(q, k, v, layout, scale)
        once = ExactOnce(exact or call.exact)
        try:
            self._check(call)
            plan = self.plan(call, call.query_tokens, layer, once)
            if not isinstance(plan, str):
                return self._sparse(layer, call, plan, self.record)
            reason = plan
        except Unsupported as refusal:
            if refusal is once.failure:
                raise
            reason = refusal.reason
        self.reasons[reason] += 1
        self.record.dense.add(layer)
        return once.own()

    def _check(self, call: TensorCall) -> None:
        """Raises Unsupported for a call that is exact in every step."""
        q, k, v = call.heads_first()
        if q.device != self.device:
            raise Unsupported(f"tensors on {q.device} in a pass on {self.device}")
        if q.shape[2] != k.shape[2]:
            raise Unsupported("cross-attention: queries and keys differ in number")
        check_inference(q, k, v)

    def _sparse(self, layer: int, call: TensorCall, plan: Plan, record: PassRecord) -> Tensor:
        grid, policy = plan.table.shape.grid, self.policy
        if grid is not None:
            policy = replace(policy, exact_prefix=grid.prefix, exact_suffix=grid.suffix)
        out = call.sparse(policy, record.stats_of(layer), plan.order, plan.head_settings)
        with suppress(torch.OutOfMemoryError):  # the result is there; the report lacks a probe
            self.probe(plan, layer, call, out)
        return out

    def plan(self, call: Call, tokens: int, row: int, exact: Exact) -> Plan | str:
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
        if not table.is_frozen:
            table.sample(row, call, exact)
            return self.facts.why_dense or table.refusal(row) or MEASURING
        if self.facts.why_dense is not None:
            return self.facts.why_dense
        head_settings = table.decide(row, call)
        if isinstance(head_settings, str):
            return head_settings
        return Plan(table, head_settings, table.order(self.facts.step))

    def end(self) -> None:
        """Ends the pass for the host. Never waits."""
        self.heads.count_layers(self.device, self.facts.which, self.calls)
        for table in self.tables.values():
            table.end_pass()

    def probe(self, plan: Plan, row: int, call: Call, out: Tensor) -> None:
        plan.table.probe_call(row, call, out)
