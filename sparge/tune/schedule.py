# SPDX-License-Identifier: Apache-2.0
"""Schedule of measuring: which forward passes, and which entries of their batch, are measured."""

from __future__ import annotations

from .facts import Conditioning


class MeasuringSchedule:
    """Schedule of one shape. The last dense step before the window is measured: the nearer a
    measurement is to the sparse steps, the better it predicts them (docs/experiments.md, Which
    dense step is measured).

    An entry is what one conditioning asks of one pass. ComfyUI computes entries in one batch or one
    by one, as memory allows, and what is measured is the same: with c and u for cond and uncond, of
    four dense steps u0 c0 u1 c1 u2 c2 [u3 c3] those in brackets. An entry is measured

    1. in the last dense step, when its conditioning has not been measured in that step;
    2. after the dense steps, until `is_done` holds: such a pass is dense for that purpose. So is
       the first of each conditioning in a run without dense steps.

    A conditioning that first comes when another's sparse pass has begun takes the settings as they
    are.
    """

    def __init__(self) -> None:
        self.measuring: list[int] = []
        """Indices of the entries to be measured, in the batch of the running pass."""
        self._conditioning: Conditioning = ()
        self._earlier: set[int] = set()  # conditionings of the steps before the measured one
        self._after = False
        self._measured: dict[int, bool] = {}  # whether after the dense steps

    def begin_pass(
        self, conditioning: Conditioning, may_be_sparse: bool, is_last_dense: bool
    ) -> None:
        """Begins a pass; call it before each one until `is_done`. may_be_sparse: the pass is after
        the dense steps. is_last_dense: it belongs to the last of them."""
        self._conditioning, self._after = conditioning, may_be_sparse
        self.measuring = []
        for place, one in enumerate(conditioning):
            wanted = may_be_sparse or (is_last_dense and one not in self._measured)
            if wanted and one not in conditioning[:place]:
                self.measuring.append(place)
        if not may_be_sparse and not is_last_dense:
            self._earlier.update(conditioning)

    @property
    def calls_a_measurement(self) -> int:
        """Number of usual measurements that each covers: two where earlier steps had one
        conditioning alone, whose measurements count for the other's.

        That is not known without earlier steps, whose passes may be one batch or not.
        """
        return 2 if len(self._earlier) == 1 else 1

    @property
    def measurements_a_layer(self) -> int:
        """Number of measurements a layer in the run, if the conditionings stay those of earlier
        steps. Without these cond and uncond are expected."""
        return len(self._earlier) or 2

    @property
    def is_complete(self) -> bool:
        """Whether all conditionings of earlier dense steps were measured: where there were such
        steps, no other pass is to be measured."""
        return bool(self._earlier) and self._measured.keys() >= self._earlier

    def measured(self) -> None:
        """Notes that a layer was measured in the running pass, in all its places."""
        for place in self.measuring:
            self._measured[self._conditioning[place]] = self._after

    def is_done(self, conditioning: Conditioning, layers_missed: bool) -> bool:
        """Whether enough is known for a sparse pass of these conditionings: each was measured, in
        one batch or on its own.

        layers_missed: some layers made dense calls, but none in a measured pass (another node skips
        layers now and then). Then each conditioning is measured after the dense steps too; once, as
        those layers may never come again.
        """
        if not self._measured.keys() >= set(conditioning):
            return False
        return not layers_missed or all(self._measured[one] for one in conditioning)
