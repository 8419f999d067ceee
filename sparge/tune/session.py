# SPDX-License-Identifier: Apache-2.0
"""Tuning over one sampling run: every head is measured in the last dense step. In later steps heads
keep as few key blocks as a target for their mean error allows, or share out a mean density. Without
an aim nothing is measured, and all heads follow one policy.

    model = Model(layers=30, grid=TokenGrid(frames=21, height=34, width=30))
    session = Session(Aim("budget", 0.2), steps=20, dense_steps=4)
    for step in range(20):
        running = session.begin_step(step, model, device)
        x = denoise(x, step, attention=running.attend)  # attend(layer, q, k, v) in each layer
        running.end()
    print(session.report())
    session.end()

Hosts that split a step into passes of their own (ComfyUI) begin those by `begin_pass`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import torch

from ..checks.argument import check_kind, whole_number
from ..policy import SparsePolicy
from ..speed.table import SpeedTable
from .aim import Aim
from .alike_heads import AlikeHeads
from .eight_bit import EightBitDense
from .facts import Conditioning, Layout, PassFacts, Place
from .head_table import HeadTable
from .measured_shape import MeasuredShape
from .model import Model
from .records import Densities, PassRecord, RunTime, Untracked
from .report import Report
from .session_pass import SessionPass
from .shape import Shape
from .tables import HeadTables
from .ways import SpeedOf, Ways, nothing_known


class Session:
    """One sampling run. Of its methods only `begin_pass` may be called from several threads."""

    def __init__(
        self,
        aim: Aim | None,
        *,
        steps: int | None = None,
        dense_steps: int = 1,
        sparse_steps: int | None = None,
        untracked: Untracked = nullcontext,
        speed: SpeedOf = nothing_known,
        exact_dense: bool = False,
        even_if_slower: bool = False,
    ) -> None:
        """Heads are measured in the last dense step, or in the first step where there is none.

        Args:
            aim: a target for the mean error of heads, or a mean density over heads and steps; None
                for heads that all follow the policy.
            steps: number of sampling steps; None where it is not known.
            dense_steps: number of dense steps before the sparse ones; with 0 the first step is
                dense all the same, and measured.
            sparse_steps: number of sparse steps, where it is not `steps` less `dense_steps`.
            untracked: context around measuring, which few calls do, for hosts that
                record the allocations of a pass.
            speed: gives the speed table of a device, such as `sparge.speed.speed_table`. It is
                asked where the first pass on a device begins. With an aim dense calls are then in 8
                bits where that is faster.
            exact_dense: dense calls are exact all the same.
            even_if_slower: heads are measured and calls are sparse also where exact calls would be
                faster.
        """
        if aim is not None:
            check_kind("aim", aim, Aim, 'one such as Aim("budget", 0.5)')
        self._dense_steps = whole_number("dense_steps", dense_steps, 0)
        measured = max(1, dense_steps)  # with the first step where there are none
        left = sparse_steps
        if steps is not None and sparse_steps is None:
            steps = whole_number("steps", steps, 0)
            sparse_steps, left = max(0, steps - dense_steps), max(0, steps - measured)
        self._sparse_steps = sparse_steps
        self.aim = aim
        self._speed, self._tables = speed, dict[torch.device, SpeedTable | None]()
        self._untracked = untracked
        self._ways = Ways(self._tables.get, exact_dense or aim is None, even_if_slower)
        self._heads = (
            AlikeHeads(untracked) if aim is None else HeadTables(aim, left, untracked, self._ways)
        )
        self._dense = EightBitDense()
        self._passes: list[SessionPass] = []
        self._rows = 0  # most that a pass had

    @property
    def tables(self) -> HeadTables:
        """Tables of the heads, which there are with an aim."""
        assert isinstance(self._heads, HeadTables)
        return self._heads

    @property
    def chosen(self) -> list[HeadTable]:
        """Tables of heads that were chosen."""
        return self._heads.chosen if isinstance(self._heads, HeadTables) else []

    def begin_pass(
        self,
        layout: Layout,
        policy: SparsePolicy,
        device: torch.device,
        facts: PassFacts,
        usable: bool = True,
    ) -> SessionPass:
        """Begins a forward pass on one device. Waits for the GPU where heads are chosen.

        Call it before the pass, never inside an attention call: what it makes outlives calls.

        policy: as this device shall run it, such as without the PV filter on Hopper. usable: the
        device has kernels; where it has none the pass is recorded alone.
        """
        if usable and device not in self._tables:
            self._tables[device] = self._speed(device)
        tables: dict[Shape, HeadTable] = {}
        may_be_sparse = usable and facts.why_dense is None
        if isinstance(self._heads, HeadTables):
            tables = self._heads.begin(layout, policy, device, facts) if usable else {}
        elif may_be_sparse:
            self._heads.begin(layout, facts.step, device)
        self._rows = max([self._rows, layout.rows, *(x.record.rows for x in self._passes[-1:])])
        looked_at = self._passes[-1].record.last_row if self._passes else None
        record = PassRecord.begin(
            facts.step, self._rows, device, may_be_sparse, self._untracked, looked_at
        )
        begun = SessionPass(
            self._heads, self._ways, device, layout, policy, facts, tables, record, self._dense,
        )  # fmt: skip
        self._passes.append(begun)
        return begun

    def begin_step(
        self,
        step: int,
        model: Model,
        device: torch.device | str,
        *,
        conditioning: Conditioning = (0,),
        policy: SparsePolicy | None = None,
    ) -> SessionPass:
        """Begins a sampling step, or one of its passes where conditionings are computed one by one.

        step: its number from 0. conditioning: number of the prompt of each entry of the batch.
        """
        device = torch.empty(0, device=device).device  # with an index, as tensors have it
        dense, sparse = self._dense_steps, self._sparse_steps
        why_dense = None if step >= dense else f"one of the first {dense} steps"
        place = None if sparse is None else Place(min(max(0, step - dense), sparse - 1), sparse)
        facts = PassFacts(conditioning, step, why_dense, step == dense - 1, place)
        return self.begin_pass(model, policy or SparsePolicy(), device, facts)

    def report(self) -> Report:
        """Report of the passes so far. Waits for the GPU."""
        densities = Densities.of([begun.record for begun in self._passes])
        reasons = sum((begun.reasons for begun in self._passes), start=Counter[str]())
        passes = [(begun.record.step, begun.record.spans) for begun in self._passes]
        time = RunTime.of(passes)
        shapes = tuple(MeasuredShape.of(table) for table in self.chosen)
        has_nan = any(begun.record.finite.not_finite() for begun in self._passes)
        counted = dict(reasons.most_common())
        return Report(self.aim, densities, shapes, counted, time, has_nan)

    def end(self) -> None:
        """Gives back what outlives the run on the devices."""
        self._heads.end()
