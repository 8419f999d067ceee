# SPDX-License-Identifier: Apache-2.0
"""What the heads of one attention shape get in each sparse step: chosen where the first one begins,
and a few times anew, from the errors that the steps before have left or what was measured again.
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

#: Times that heads are chosen in a run, after equal numbers of steps.
CHOICES_A_RUN = 6
#: Before which of them, counted from 1, heads are measured again.
MEASURED_CHOICES = (3, 5)
#: Steps between two choices, at least.
LEAST_STEPS = 3
#: The same where nobody knows how many steps will come.
UNKNOWN_STEPS = 8
#: Where no choice goes by them, one in so many layers is probed between two choices: a probe takes
#: .36 ms of a call of Wan 480p, whose own attention takes 5.5 ms a layer.
REPORTED_LAYERS = 4
#: Past what was expected of it by this factor a head of a profile has drifted; below, it may be the
#: luck of the sample.
TOLERANCE = 1.5
#: How much denser such a head gets. Around 20 % density this takes away a factor of 1.6 of the
#: error (DINOv2: .038 at 20 %, .023 at 30 %), as much as TOLERANCE lets pass.
DENSER = 1.5


def interval_of(steps: int) -> int:
    """From one choice to the next, in a run of so many sparse steps."""
    return max(LEAST_STEPS, -(-steps // CHOICES_A_RUN))


def later_choices(steps: int) -> int:
    """How many come after the first one. The last step alone gets none: clips 0-7 come no closer to
    dense ones by it (H200; of their heads .02 more are as expected), and the probes before it take
    longer than those for the report."""
    return len(range(interval_of(steps), steps - 1, interval_of(steps)))


class StepChoices:
    """Of one run; steps are numbers of sparse ones.

    Errors drift while a clip takes shape: on the small video DiT those of a head halve or double
    between the dense step that measured it and the last sparse one. One factor, the drift, corrects
    all candidates of a head and walk, as if what was measured of them kept its shape. It mostly
    does for some steps. Not for a whole run: heads of the small DiT that first do best with cubes
    do two to five times as well with rows in the end. So the steps before the third and the fifth
    choice are measured once more, as the dense one was. Clips 0-2 of three small DiTs at 10 / 20 /
    30 / 50 % density, in dB, and the share of calls whose error is within a factor of 1.5 of what
    was expected (H200, variants of a4052fb), with the third choice alone and with both:

        30.4 34.1 37.1 44.4 (.87)   28.0 31.6 35.0 40.2 (.92)   28.0 31.5 34.9 40.4 (.92)
        30.4 34.0 37.2 44.7 (.90)   28.2 31.7 35.1 40.3 (.92)   28.2 31.8 35.2 40.9 (.93)

    Clips of 5,720 tokens come .1, 1.2 and 1.4 dB closer to dense ones at 10, 20 and 50 % by both
    measurements, those of 2,016 tokens -.2, .2 and 1.6 dB (means over the three models, four and
    six clips); without them heads err up to 1.66 and 1.29 times as much as by plain drop, with them
    1.08 and 1.31.

    Before all choices from the second on, or before the second and the fourth: 0 to .8 dB worse at
    10 and 20 % (variants of e6e58a8, with other rows of the query blocks; see `spread_rows`). Four
    choices, measured after half of the run, instead of six after a third: clips no nearer, heads
    further from what is expected. Heads that leave their walk late (when measured again, or for one
    that errs 1.3 or 1.6 times less): clips no nearer.
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
        """From one of the two. steps: how many will be sparse, where that is known. again: times
        that heads may be measured again.

        Waits for the GPU. Raises ValueError when nothing was measured.
        """
        assert (calibration is None) != (profile is None)
        self.given: list[HeadChoices] = []
        """Those of each step so far."""
        self.interval = UNKNOWN_STEPS
        """Steps from one choice to the next; one more after the last choice, if that leaves one."""
        if steps is not None:
            self.interval = interval_of(steps)
        self.again: Calibration | None = None
        """What sparse calls of the running step are measured into: of one conditioning as many
        query blocks as before of two."""
        self._found: Calibration | None = None  # the same of a step that is over
        self._aim, self._steps = aim, steps
        self._end = sys.maxsize if steps is None else max(1, steps)
        self._calibration = calibration
        self._chosen = 0  # step of the last choice
        self._number = 1  # of that choice
        self._since: dict[int, HeadChoices] = {}  # given from there on, by step
        self._measured_choices = MEASURED_CHOICES[:again] if calibration is not None else ()
        self._of_steps: list[Alternating] = []  # from there on, where those differ
        if profile is not None:
            self._now = profile
        elif calibration is not None:
            self._choose_from_new(calibration.offers())
        self.first = self._now
        """As if all steps were alike: what a profile keeps."""

    def _choose_from_new(self, offers: Offers) -> None:
        self._offers, self._drift = offers, Drift(offers.walks)
        self._choose()

    def _choose(self) -> None:
        """For the steps until the next choice."""
        wanted = range(self._chosen, self._next_choice())
        self._now, self._of_steps = self._aim.freeze(
            self._offers, self._steps or 1, wanted, self._drift.ahead
        )

    def _next_choice(self) -> int:
        """Its step, or the number of steps where none follows; as in `later_choices`."""
        following = self._chosen + self.interval
        return following if following < self._end - 1 else self._end

    @property
    def _measured_step(self) -> int | None:
        """The last step before the next choice, where heads are measured for that."""
        following = self._next_choice()
        measured = following < self._end and self._number + 1 in self._measured_choices
        return following - 1 if measured else None

    def is_due(self, step: int) -> bool:
        """Whether this step's choices are to be made anew."""
        return self._next_choice() <= step < self._end

    def visit(self, layer: int, step: int) -> int | None:
        """The number of the visit that a probe pays to a layer in a step, None where it pays none.

        Two before a choice that goes by them, in two steps in a row: one of each kind
        (`Alternating`), which cut the tokens differently, too; other layers in other pairs of
        steps. Else one, for the report, to one in REPORTED_LAYERS layers, by turns.
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
        """For this step and those after it, from what was measured again, if anything was since the
        last choice. drift: as in `Probe.drift`. Waits for the GPU."""
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
                left = (1 - more) / (1 - now.density).clamp(min=1e-6)  # of what was dropped
                return replace(
                    now,
                    density=torch.where(off, more, now.density),
                    contrast=torch.where(off, 1 + (now.contrast - 1) * left, now.contrast),
                )

            self._now = self._now.each(denser)

    def at(self, step: int) -> HeadChoices:
        """Of the next step, which begins. Allocates where it is one to be measured."""
        if step != self._measured_step:
            self.again, self._found = None, self.again or self._found
        elif self._calibration is not None and self.again is None:
            self.again = self._calibration.anew()
        self.given.append(self._of(step))
        self._since[step] = self.given[-1]
        return self.given[-1]

    def prepare(self, step: int) -> None:
        """Works out what `at` will give for the next step, unless that depends on what comes until
        then: call it while the GPU has work left. With only what its own step gets left to do, and
        layers in threads, a first choice holds CogVideoX-5B up for .106 s instead of .165, Flux for
        .083 instead of .132, a later one for .037 and .009 instead of .070 and .027 (host of an
        H200, beside other work; b6593ad and b65bba0)."""
        if step < self._end and not self.is_due(step):
            self._of(step)

    def _of(self, step: int) -> HeadChoices:
        """As the next one that is given."""
        place = min(step - self._chosen, len(self._of_steps) - 1)
        now = self._of_steps[place] if self._of_steps else self._now
        return now.in_turn(len(self.given))

    def _seen(self) -> Seen:
        """By probes since the last choice; layers that none visited count as seen in all steps."""
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
