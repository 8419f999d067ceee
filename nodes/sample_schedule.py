# SPDX-License-Identifier: Apache-2.0
"""Which forward passes of one attention shape are measured, and which entries of their batch."""

from __future__ import annotations

Conditioning = tuple[int, ...]  # ComfyUI's cond_or_uncond: of each entry of the batch, in its order

#: Of each layer, over all conditionings of a shape: one for each walk through the tokens that
#: calibration tries. On an H200 a sample takes 3.5 ms at the Mochi shape, however few its query
#: blocks, beside 43 of dense attention: three are 3 % of eight dense calls.
SAMPLES_A_LAYER = 3


class SampleSchedule:
    """The last entries of the dense steps before the window, because the nearer a sample is to the
    sparse steps, the better it predicts them: the error of a head changes up to threefold over four
    dense steps.

    An entry is what one conditioning asks of one pass. ComfyUI computes entries in one batch or one
    by one, as memory allows, in the same order, and what is measured is the same: with c and u for
    cond and uncond, of four dense steps u0 c0 u1 c1 u2 [c2 u3 c3] those in brackets. An entry is
    measured

    1. after the dense steps, until `is_done` holds: such a pass is dense for that purpose. So is
       the first of each conditioning in a run without dense steps;
    2. in the last dense step, when its conditioning has not been measured in that step;
    3. when fewer than SAMPLES_A_LAYER entries are expected between it and the end of the dense
       steps, and fewer have been measured.

    How many a step takes (conditionings, context windows, evaluations of a sampler between its
    steps) is what the step before took, or the running one so far if that is more. That can be
    wrong, most of all in the first step: 3 may then choose an earlier pass than it should, while 1
    and 2 do not depend on it. A conditioning that first comes when another's sparse pass has begun
    takes the choices as they are.
    """

    def __init__(self) -> None:
        self.measuring: list[int] = []
        """Places in the batch of the running pass that are to be measured."""
        self._conditioning: Conditioning = ()
        self._steps_left: int | None = None
        self._entries = self._entries_before = (
            0  # of the running step so far, and of the one before
        )
        self._samples = 0
        self._to_count = False
        self._measured: dict[int, int | None] = {}  # conditioning: steps left when it last was

    def begin_pass(
        self, conditioning: Conditioning, may_be_sparse: bool, steps_left: int | None
    ) -> None:
        """Before each pass until `is_done`. may_be_sparse: the pass is after the dense steps.
        steps_left: dense steps that follow its own; None when it is in none of them."""
        if steps_left != self._steps_left:
            self._steps_left = steps_left
            self._entries_before, self._entries = self._entries, 0
        self._conditioning, self.measuring, self._to_count = conditioning, [], True
        for place, one in enumerate(conditioning):
            self._entries += 1
            if steps_left is None:
                wanted = may_be_sparse
            else:
                last_chance = steps_left == 0 and self._measured.get(one) != 0
                wanted = last_chance or self._is_among_the_last(steps_left)
            if wanted:
                self.measuring.append(place)

    def measured(self) -> None:
        """A layer was measured in the running pass, in all its places."""
        if self._to_count:
            self._samples += len(self.measuring)
            self._to_count = False
        for place in self.measuring:
            self._measured[self._conditioning[place]] = self._steps_left

    def is_done(self, conditioning: Conditioning, layers_missed: bool) -> bool:
        """Whether enough is known for a sparse pass of these: each was measured, in one batch or
        on its own.

        layers_missed: some layers made dense calls, but none in a measured pass (another node skips
        layers now and then). Then each conditioning is measured after the dense steps too; once, as
        those layers may never come again.
        """
        if not self._measured.keys() >= set(conditioning):
            return False
        after = all(self._measured[one] is None for one in conditioning)
        return after or not layers_missed

    def _is_among_the_last(self, steps_left: int) -> bool:
        a_step = max(self._entries, self._entries_before)
        to_come = a_step - self._entries + steps_left * a_step
        return to_come < SAMPLES_A_LAYER and self._samples + len(self.measuring) < SAMPLES_A_LAYER
