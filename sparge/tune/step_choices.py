# SPDX-License-Identifier: Apache-2.0
"""Choices for the heads of one attention shape in each sparse step.

Heads are chosen where the first sparse step begins, and a few times anew: from the errors that the
steps before have left, or from what was measured again.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import Tensor

from .aim import Aim
from .alternating import Alternating
from .calibration import Calibration
from .choices import HeadChoices
from .drift import Drift, Seen
from .offers import Offers

#: Choices in a run, after equal numbers of steps.
CHOICES_A_RUN = 6
#: Numbers of the choices, from 1, before which heads are measured again.
MEASURED_CHOICES = (3, 5)
#: Least number of steps between two choices.
LEAST_STEPS = 3
#: Steps between two choices where nobody knows how many steps will come.
UNKNOWN_STEPS = 8
#: One in so many layers is probed between two choices that do not go by probes: a probe is dear
#: beside a layer's attention (docs/experiments.md, Cost of a probe).
REPORTED_LAYERS = 4
#: Factor past what was expected by which a head of a profile has drifted; below it, the luck of the
#: probe may explain the error.
TOLERANCE = 1.5
#: Factor by which such a head gets denser; takes away about as much error as TOLERANCE lets pass
#: (docs/experiments.md, Heads of a profile that drifted).
DENSER = 1.5


def interval_of(steps: int) -> int:
    """Steps from one choice to the next, in a run of so many sparse steps."""
    return max(LEAST_STEPS, -(-steps // CHOICES_A_RUN))


def later_choices(steps: int) -> int:
    """Number of choices after the first one. The last step alone gets none (docs/experiments.md,
    Choosing anew and measuring again)."""
    return len(range(interval_of(steps), steps - 1, interval_of(steps)))


class StepChoices:
    """Choices of one run; steps are numbers of sparse ones.

    Errors drift while a clip takes shape. One factor, the drift, corrects all candidates of a head
    and token order, as if what was measured of them kept its shape. It mostly does for some steps,
    not for a whole run: heads that first do best with cubes do far better with rows in the end. So
    the steps before the third and the fifth choice are measured once more, as the dense one was
    (docs/experiments.md, Choosing anew and measuring again).
    """

    def __init__(
        self,
        aim: Aim,
        steps: int | None,
        *,
        calibration: Calibration | None = None,
        profile: Alternating | None = None,
        again: int = len(MEASURED_CHOICES),
    ) -> None:
        """Starts from either a calibration or a profile.

        steps: number of sparse steps, where that is known. again: times that heads may be measured
        again.

        Waits for the GPU. Raises ValueError when nothing was measured.
        """
        assert (calibration is None) != (profile is None)
        self.given: list[HeadChoices] = []
        """Choices of each step so far."""
        self.interval = UNKNOWN_STEPS
        """Steps from one choice to the next; one more after the last choice, if that leaves one."""
        if steps is not None:
            self.interval = interval_of(steps)
        self.again: Calibration | None = None
        """Calibration that sparse calls of the running step are measured into; of one conditioning
        as many query blocks as before of two."""
        self._found: Calibration | None = None  # the same for a step that is over
        self._aim, self._steps = aim, steps
        self._end = sys.maxsize if steps is None else max(1, steps)
        self._calibration = calibration
        self._chosen = 0  # step of the last choice
        self._number = 1  # number of that choice
        self._since: dict[int, HeadChoices] = {}  # choices given since, by step
        self._measured_choices = MEASURED_CHOICES[:again] if calibration is not None else ()
        self._of_steps: list[Alternating] = []  # choices from there on, where steps differ
        if profile is not None:
            self._now = profile
        elif calibration is not None:
            self._choose_from_new(calibration.offers())
        self.first = self._now
        """Choices as if all steps were alike, which a profile keeps."""

    def _choose_from_new(self, offers: Offers) -> None:
        self._offers, self._drift = offers, Drift(offers.walks)
        self._choose()

    def _choose(self) -> None:
        """Chooses for the steps until the next choice."""
        wanted = range(self._chosen, self._next_choice())
        self._now, self._of_steps = self._aim.freeze(
            self._offers, self._steps or 1, wanted, self._drift.ahead
        )

    def _next_choice(self) -> int:
        """Step of the next choice, or the number of steps where none follows; as in
        `later_choices`."""
        following = self._chosen + self.interval
        return following if following < self._end - 1 else self._end

    @property
    def _measured_step(self) -> int | None:
        """Last step before the next choice, where heads are measured again for that; None where
        they are not."""
        following = self._next_choice()
        measured = following < self._end and self._number + 1 in self._measured_choices
        return following - 1 if measured else None

    def is_due(self, step: int) -> bool:
        """Whether this step's choices are to be made anew."""
        return self._next_choice() <= step < self._end

    def visit(self, layer: int, step: int) -> int | None:
        """Number of the visit that a probe pays to a layer in a step; None where it pays none.

        Before a choice that goes by them there are two, in two steps in a row: one of each kind
        (`Alternating`), which cut the tokens differently, too. Other layers have other pairs of
        steps. Else one probe visits one in REPORTED_LAYERS layers by turns, for the report.
        """
        following = self._next_choice()
        steps = following - self._chosen
        counts = self._calibration is not None or self._aim.target is not None
        pays = following < self._end and counts and self._measured_step != following - 1
        before = following - 1 - step  # steps that come after this one
        choices = self._chosen // self.interval
        earlier = 2 * choices
        if not pays:
            reports = choices // 2 if counts else choices  # a choice that pays may lie between two
            turn = before % steps + reports % REPORTED_LAYERS * steps
            return earlier if layer % (REPORTED_LAYERS * steps) == turn else None
        return earlier + 1 - before % 2 if layer % (steps // 2) == before // 2 else None

    def choose_anew(self, step: int, drift: Tensor) -> None:
        """Chooses for this step and those after it, from what was measured again, if anything was
        since the last choice. Waits for the GPU.

        drift: as in `Probe.drift`.
        """
        seen, steps = self._seen(), step - self._chosen
        self._chosen, self._number, self._since = step, self._number + 1, {}
        measured, self.again, self._found = self.again or self._found, None, None
        if self._calibration is not None and measured is not None and any(measured.samples):
            measured.fill_from(self._calibration)
            self._calibration = measured
            self._choose_from_new(measured.offers())
        elif self._calibration is not None:
            self._drift.find(drift, seen, steps)
            self._choose()
        elif self._aim.target is not None:
            off = drift > TOLERANCE

            def denser(now: HeadChoices) -> HeadChoices:
                more = (now.density * DENSER).clamp(max=1)
                left = (1 - more) / (1 - now.density).clamp(min=1e-6)  # share of what was dropped
                return replace(
                    now,
                    density=torch.where(off, more, now.density),
                    contrast=torch.where(off, 1 + (now.contrast - 1) * left, now.contrast),
                )

            self._now = self._now.each(denser)

    def at(self, step: int) -> HeadChoices:
        """Choices of the next step, which begins. Allocates where it is one to be measured."""
        if step != self._measured_step:
            self.again, self._found = None, self.again or self._found
        elif self._calibration is not None and self.again is None:
            self.again = self._calibration.anew()
        self.given.append(self._of(step))
        self._since[step] = self.given[-1]
        return self.given[-1]

    def prepare(self, step: int) -> None:
        """Works out what `at` will give for the next step, unless that depends on what comes until
        then. Call it while the GPU has work left (docs/experiments.md, Host time of a choice)."""
        if step < self._end and not self.is_due(step):
            self._of(step)

    def _of(self, step: int) -> HeadChoices:
        """Choices of a step, as the next one that is given."""
        place = min(step - self._chosen, len(self._of_steps) - 1)
        now = self._of_steps[place] if self._of_steps else self._now
        return now.in_turn(len(self.given))

    def _seen(self) -> Seen:
        """Steps that probes saw since the last choice; layers that none visited count as seen in
        all steps."""
        given = self._since or {self._chosen: self._now.pooling}
        walks = torch.stack([choices.walk for choices in given.values()], 1)
        of_layers = (
            [self.visit(layer, step) is not None for step in given] for layer in range(len(walks))
        )
        visited = torch.tensor([*of_layers], device="cpu")
        visited |= ~visited.any(1, keepdim=True)
        since = [float(step - self._chosen) for step in given]
        steps = torch.tensor(since, dtype=torch.float32, device="cpu")
        return Seen(walks, visited, (visited * steps).sum(1) / visited.sum(1))
