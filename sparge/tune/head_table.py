# SPDX-License-Identifier: Apache-2.0
"""Heads of one attention shape on one device: measured while dense, chosen, measured again."""

from __future__ import annotations

import torch
from torch import Tensor

from ..head_settings import HeadSettings
from ..order.grid import TokenOrder
from ..order.variants import VARIANTS
from ..policy import SparsePolicy
from ..speed.measuring_cost import AGAIN_CALLS
from .aim import Aim
from .call import Call
from .facts import PassFacts
from .head_measuring import NOT_MEASURED, HeadMeasuring, entries
from .records import Untracked
from .settings_table import LayerSettings, SettingsTable
from .shape import Shape
from .step_settings import StepSettings
from .ways import Choice, RunLength, Ways

#: Number of the conditioning that is measured again while steps are sparse: the positive prompt.
COND = 0


class HeadTable:
    """Table of heads, made where a forward pass starts; its methods say which of them may wait for
    the GPU."""

    def __init__(
        self,
        shape: Shape,
        rows: int,
        aim: Aim,
        policy: SparsePolicy,
        device: torch.device,
        ways: Ways,
        run: RunLength,
        untracked: Untracked,
    ) -> None:
        self.shape, self.device = shape, device
        self._untracked = untracked
        self.heads = shape.heads
        self._aim, self._policy = aim, policy
        self._workload = shape.workload()
        self._workload.order.on(device)  # copied there now, not inside a call
        self._orders = [order.on(device) for order in shape.orders()]
        # Worked out before steps begin: there the GPU would wait for it.
        by_rank = self._workload.density(range(self._workload.key_blocks + 1))
        self._kept_by_rank = torch.from_numpy(by_rank).float()
        self.measuring = HeadMeasuring(
            rows,
            self.heads,
            float(self._kept_by_rank[0]),
            self._workload,
            device,
            ways,
            run,
            untracked,
        )
        self._place_again: int | None = None  # index in the batch of the pass
        self._of_layers: LayerSettings | None = None
        self._steps: StepSettings | None = None
        self._facts: PassFacts | None = None  # facts of the running pass
        self._first: PassFacts | None = None  # facts of the first sparse pass
        self._step = -1  # number of the sparse step that the head settings are of
        self.sparse_rows: set[int] = set()
        """Rows whose calls are sparse, in some pass at least."""
        self._kept: list[float] = []  # share of pairs that the densities of each row keep

    @property
    def is_chosen(self) -> bool:
        """Whether its heads are chosen."""
        return self._steps is not None

    @property
    def settings(self) -> SettingsTable | None:
        """First settings, as if all steps were alike; None before there are any."""
        return None if self._steps is None else self._steps.first

    def begin_pass(self, facts: PassFacts) -> None:
        """Begins a pass. Waits for the GPU where settings are made."""
        self._facts = facts
        may_be_sparse = facts.why_dense is None
        if self._steps is None and self.measuring.why_dense is None:
            if may_be_sparse and self.measuring.is_done(facts):
                self._choose(facts)
            else:
                self.measuring.begin_pass(facts)
        self.measuring.find_not_finite()
        if self._steps is not None and may_be_sparse:
            self._begin_step(self._steps, facts)
            found = COND in facts.conditioning and self._steps.again is not None
            self._place_again = facts.conditioning.index(COND) if found else None

    def end_pass(self) -> None:
        """Works ahead while the GPU still computes the pass. Where heads were measured in it, waits
        for one layer after the other."""
        facts = self._facts
        if self._steps is None and facts is not None and self.measuring.is_done_early(facts):
            self._choose(facts)
        if self._steps is not None:
            self._steps.prepare(self._step + 1)

    def order(self, step: int) -> TokenOrder | None:
        """Token order in which the calls of a step are sparse."""
        return self._orders[step % VARIANTS] if self._orders else None

    def _choose(self, facts: PassFacts) -> None:
        """Chooses from what was measured so far. Waits for the GPU."""
        steps = self.measuring.choose(self._aim, facts.place)
        if steps is not None:
            self._steps = steps

    def _begin_step(self, steps: StepSettings, facts: PassFacts) -> None:
        """Takes the head settings of the step of this pass. Passes that were dense to be measured
        have no part in the mean. Waits for the GPU where settings are made anew or, as the noise
        level of the pass did, where steps differ."""
        self._first = self._first or facts
        if (step := facts.steps_since(self._first)) <= self._step:
            return  # another conditioning, or a sampler that goes back
        before, self._step = steps.given[-1:], step
        now = steps.at(step)
        if now not in before:
            self._give(now)

    def head_settings(self, row: int) -> HeadSettings | str:
        """Settings of the heads of a layer, or the reason why it has to stay dense."""
        if row in self.measuring.not_finite:
            return self.measuring.not_finite[row]
        of_layers = self._of_layers or ()
        head_settings = of_layers[row] if row < len(of_layers) else None
        return head_settings or self.refusal(row) or NOT_MEASURED

    def _give(self, settings: SettingsTable) -> None:
        """Sets head settings for the calls from now on."""
        self._of_layers = settings.of_layers(self.device, self._policy, before=self._of_layers)
        self._kept = self._kept_shares(settings.density, settings.floor).mean(1).tolist()

    def predicted(self) -> Tensor:
        """(rows, heads) float32: the error expected in the steps so far, their mean."""
        return _mean([settings.error for settings in self._given()])

    def _given(self) -> list[SettingsTable]:
        """Choices that steps have had so far; those of the first before it."""
        assert self._steps is not None
        return self._steps.given or [self._steps.first]

    @property
    def now(self) -> SettingsTable:
        """Choices of the running step."""
        return self._given()[-1]

    def decide(self, row: int, choice: Choice) -> HeadSettings | str:
        """Settings of a call of a layer, or why it has to stay dense: at the densities of this
        pass it may be slower."""
        head_settings = self.head_settings(row)
        if isinstance(head_settings, str):
            return head_settings
        if self._kept[row] >= choice.break_even[head_settings.pools]:
            return choice.why_slower(head_settings.pools)
        self.sparse_rows.add(row)
        return head_settings

    def refusal(self, row: int) -> str | None:
        """Reason why a layer cannot be measured whatever comes, or None."""
        return self.measuring.refusal(row)

    @property
    def measures_again(self) -> bool:
        """Whether sparse calls are measured in this step."""
        return self._place_again is not None

    def measure_again(self, row: int, call: Call) -> None:
        """Inside a sparse call of a layer: measures it, where this step is to be. Never waits."""
        if self._place_again is not None and self._steps is not None:
            self._measure_again(self._steps, row, call, self._place_again)

    def _measure_again(self, steps: StepSettings, row: int, call: Call, place: int) -> None:
        """Once a layer in a step, however often that is evaluated. Without memory for it, settings
        go on from what was measured before."""
        if steps.again is None or steps.again.blocks_measured[row]:
            return
        assert self._facts is not None
        try:
            with self._untracked():
                for qkv in entries(call, [place], len(self._facts.conditioning)):
                    steps.again.add(row, *qkv, scale=call.scale, calls=AGAIN_CALLS)
        except torch.OutOfMemoryError:
            steps.give_up_again()

    def density(self) -> Tensor:
        """(rows, heads) float32: the share of attention that each head keeps, forced blocks
        included, the mean over the steps so far; NaN for rows that are not measured."""
        measured = self._of_layers.measured if self._of_layers is not None else ()
        shape = len(measured), self.heads
        kept = torch.full(shape, torch.nan, dtype=torch.float32, device="cpu")
        rows = [row for row, known in enumerate(measured) if known]
        if rows:
            given = self._given()
            shares = [self._kept_shares(each.density[rows], each.floor) for each in given]
            kept[rows] = _mean(shares)
        return kept

    def _kept_shares(self, asked: Tensor, floor: int) -> Tensor:
        """Share of pairs that each density really keeps, on the CPU as these are."""
        return self._kept_by_rank[(asked * self._workload.key_blocks).long().clamp(min=floor)]


def _mean(of_steps: list[Tensor]) -> Tensor:
    """Mean in float32; of equal values that value, however many there are."""
    return torch.stack(of_steps).double().mean(0).float()
