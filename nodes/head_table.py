# SPDX-License-Identifier: Apache-2.0
"""The heads of one attention shape on one device: measured while dense, frozen, probed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sparge import HeadBudget, SparsePolicy, TokenGrid, TokenOrder, Unsupported, cube_order
from ..sparge.calibrate import (
    Calibration,
    HeadChoices,
    Probe,
    Workload,
    measure_for,
)
from .aim import Aim
from .attention_call import AttentionCall
from .host import untracked_allocations

Conditioning = tuple[int, ...]  # entries of ComfyUI's cond_or_uncond, each once, ascending

#: Query blocks of every head that one call measures, and the calls of a layer for each that is
#: measured (the first one always is). On an H200 a sample takes 3.5 ms at the Mochi shape, beside
#: 43 of dense attention: 8 % of a run whose only dense call is the first, 4 to 5 % of four dense
#: steps, which give a head 4 to 6 blocks of each conditioning.
BLOCKS_A_CALL = 2
CALLS_A_SAMPLE = 3
#: Sparse passes in which a layer is probed once: 8 of 350 query blocks, exact, in every eighth pass
#: are .3 % of the products of dense attention.
PASSES_A_PROBE = 8

NOT_MEASURED = "this layer could not be measured"
NO_MEMORY = "not enough memory to measure this layer"


@dataclass(frozen=True)
class Shape:
    """What one set of choices is for: conditionings of one shape share theirs."""

    tokens: int
    heads: int
    grid: TokenGrid | None
    """None where the tokens stay in the order they come."""

    def order(self, device: torch.device) -> TokenOrder | None:
        return None if self.grid is None else cube_order(self.grid).on(device)

    def workload(self) -> Workload:
        if self.grid is None:
            return Workload.of_tokens(self.tokens)
        return Workload(cube_order(self.grid))


class HeadTable:
    """Made where a forward pass starts; its methods say which of them may wait for the GPU."""

    def __init__(
        self, shape: Shape, rows: int, aim: Aim, policy: SparsePolicy, device: torch.device
    ) -> None:
        self.shape, self.rows, self.device = shape, rows, device
        self.order = shape.order(device)
        self.choices: HeadChoices | None = None
        self.probe: Probe | None = None
        self.why_dense: str | None = None
        self._aim, self._policy = aim, policy
        self._workload = shape.workload()
        self._workload.order.on(device)  # copied there now, not inside a call
        self._calibrations: dict[Conditioning, Calibration] = {}
        self._calls: Counter[tuple[Conditioning, int]] = Counter()
        self._refusals: dict[int, str] = {}
        self._budgets: list[HeadBudget | None] = []
        self._probed: list[tuple[int, int]] = []  # (pass, row) that tighten has not yet seen

    def prepare(self, conditioning: Conditioning) -> None:
        """Where a pass begins that shall be measured."""
        if conditioning in self._calibrations or self.why_dense:
            return
        try:
            self._calibrations[conditioning] = Calibration.begin(
                layers=self.rows,
                heads=self.shape.heads,
                workload=self._workload,
                blocks_a_call=BLOCKS_A_CALL,
                measure=measure_for(self.device),
                device=self.device,
            )
        except ValueError as nothing_to_drop:
            self.why_dense = str(nothing_to_drop)

    def has_measured(self, conditioning: Conditioning) -> bool:
        """Whether each of them was measured, in one batch or on its own."""
        measured = [key for key, found in self._calibrations.items() if any(found.samples)]
        return set().union(*measured).issuperset(conditioning)

    def sample(self, conditioning: Conditioning, row: int, call: AttentionCall) -> None:
        """Inside a dense call: measures it now and then. Never waits."""
        calibration = self._calibrations.get(conditioning)
        if calibration is None or row >= self.rows or row in self._refusals:
            return
        earlier = self._calls[conditioning, row]
        self._calls[conditioning, row] += 1
        if earlier and (earlier + row) % CALLS_A_SAMPLE:
            return
        try:
            with untracked_allocations():
                calibration.sample(row, *call.heads_first(), scale=call.scale)
        except Unsupported as refusal:
            self._refusals[row] = refusal.reason
        except torch.OutOfMemoryError:  # the dense call may fit all the same
            self._refusals[row] = NO_MEMORY

    def freeze(self) -> None:
        """From what was measured so far. Waits for the GPU, once."""
        first, *others = self._calibrations.values()
        try:
            choices = self._aim.freeze(first.joined(others))
        except ValueError:  # no layer gave finite numbers
            self.why_dense = NOT_MEASURED
        else:
            self.use(choices)
        self._calibrations.clear()

    def use(self, choices: HeadChoices) -> None:
        """Makes all that sparse calls need, so that they allocate nothing that outlives them."""
        self.choices = choices
        self._budgets = [choices.budget(row, self.device) for row in range(self.rows)]
        for budget in filter(None, self._budgets):
            budget.table(self._policy)
        self.probe = Probe.begin(
            layers=self.rows, heads=self.shape.heads, workload=self._workload, device=self.device
        )

    def budget(self, row: int) -> HeadBudget | str:
        """What the heads of a layer may keep, or why it has to stay dense."""
        budget = self._budgets[row] if row < self.rows else None
        return budget or self.refusal(row) or NOT_MEASURED

    def refusal(self, row: int) -> str | None:
        """Why a layer cannot be measured whatever comes, or None."""
        return self.why_dense or self._refusals.get(row)

    def probe_call(self, row: int, step: int, call: AttentionCall, out: Tensor) -> None:
        """Inside a sparse call that gave `out`: compares it now and then. Never waits."""
        if self.probe is None or row % PASSES_A_PROBE != step % PASSES_A_PROBE:
            return
        with untracked_allocations():
            rows = call.result_heads_first(out)
            self.probe.sample(row, *call.heads_first(), rows, scale=call.scale)
        self._probed.append((step, row))

    def tighten(self, step: int) -> None:
        """Where a pass begins: heads that an earlier step found too far off get denser. Without a
        target there is no too far: a mean density is what the user asked for. Never waits."""
        due = [(at, row) for at, row in self._probed if at < step]
        self._probed = [(at, row) for at, row in self._probed if at >= step]
        target = self._aim.target
        if self.probe is None or target is None:
            return
        for row in sorted({row for _, row in due}):
            budget = self._budgets[row]
            assert budget is not None  # only sparse calls are probed
            self.probe.tighten(row, budget, target)

    def density(self) -> Tensor:
        """(rows, heads) float32: the share of attention that each head now keeps, forced blocks
        included; NaN for rows that are not measured. Waits for the GPU."""
        kept = torch.full((self.rows, self.shape.heads), torch.nan)
        for row, budget in enumerate(self._budgets):
            if budget is not None:
                shares = sorted(set(budget.density.tolist()))
                known = dict(zip(shares, self._kept(shares, budget.floor), strict=True))
                kept[row] = torch.tensor([known[share] for share in budget.density.tolist()])
        return kept

    def _kept(self, shares: list[float], floor: int) -> list[float]:
        """The share of pairs that each density really keeps."""
        ranks = (torch.tensor(shares) * self._workload.key_blocks).long().clamp(min=floor)
        return self._workload.density(ranks.tolist()).tolist()
