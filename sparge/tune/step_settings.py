# SPDX-License-Identifier: Apache-2.0
"""Head settings of one attention shape in each sparse step.

Heads are chosen when the dense steps are measured, and twice anew from what was measured again.
"""

from __future__ import annotations

import sys

from .aim import Aim
from .error_table import ErrorTable
from .fetched_sums import FetchedSums
from .measurement import Measurement
from .settings_table import SettingsTable

#: Times that heads are measured again, after equal numbers of steps.
MEASURED_AGAIN = 2
#: Least number of steps between two settings.
LEAST_STEPS = 6
#: Steps between two settings where nobody knows how many steps will come.
UNKNOWN_STEPS = 16


def interval_of(steps: int | None) -> int:
    """Steps from one choice to the next, in a run of so many sparse steps."""
    if steps is None:
        return UNKNOWN_STEPS
    return max(LEAST_STEPS, -(-steps // (MEASURED_AGAIN + 1)))


def fall_of(mean: float) -> float:
    """Share of a mean density that the first sparse step gets more and the last one less.

    Linear between 0.6 at 10 %, 0.3 at 30 % and 0 at 50 %, which were the best or nearly so. The
    denser a call, the less another block of it is worth.
    """
    return max(0.0, 0.75 * (1 - 2 * mean))


def step_means(mean: float, steps: int, least: float = 0.0) -> list[float]:
    """Densities of the sparse steps, whose mean is `mean`; a single one where all are equal. Later
    steps build on what an early step gets wrong (docs/experiments.md, Density over the sampling
    steps).

    least: share that is kept whatever is chosen; only what is above it can fall.
    """
    fall = fall_of(mean) * (mean - least)
    if steps < 2 or fall <= 0:
        return [mean]
    return [mean + fall * (1 - 2 * step / (steps - 1)) for step in range(steps)]


class Chooser:
    """Settings of all steps from one measurement, each worked out when it is first asked for."""

    def __init__(self, aim: Aim, error_table: ErrorTable, steps: int | None) -> None:
        self._error_table, self._means = error_table, [aim.value]
        self._aim = aim
        self._made: dict[float, SettingsTable] = {}  # by mean density
        if aim.target is not None:
            self._made[aim.value] = error_table.choose(target=aim.value)
        else:
            self._means = step_means(aim.value, steps or 1, float(error_table.kept.min()))

    @property
    def alike(self) -> SettingsTable:
        """Settings as if all steps were alike."""
        return self._of(self._aim.value)

    def at(self, step: int) -> SettingsTable:
        return self._of(self._means[min(step, len(self._means) - 1)])

    def _of(self, value: float) -> SettingsTable:
        if value not in self._made:
            self._made[value] = self._error_table.settings(self._error_table.climb(value))
        return self._made[value]


class StepSettings:
    """Settings of one run; steps are numbers of sparse ones.

    Errors of heads change while a clip takes shape: heads that first do best with cubes do far
    better with rows in the end. So some steps are measured once more, as the dense one was, and
    heads are chosen anew after each (docs/experiments.md, Choosing anew and measuring again).
    """

    def __init__(
        self,
        aim: Aim,
        steps: int | None,
        *,
        measurement: Measurement,
        again: int = MEASURED_AGAIN,
    ) -> None:
        """Starts from a measurement.

        steps: number of sparse steps, where that is known. again: times that heads may be measured
        again.

        Waits for the GPU. Raises ValueError when nothing was measured.
        """
        self.given: list[SettingsTable] = []
        """Settings of each step so far."""
        self.again: Measurement | None = None
        """Measurement that sparse calls of the running step are measured into; None where there is
        none, or no memory for it."""
        self._open: Measurement | None = None  # the same, also where memory ran out
        self._aim, self._steps = aim, steps
        self._interval = interval_of(steps)
        self._end = sys.maxsize if steps is None else max(1, steps)
        self._latest = measurement  # what the next one goes on from
        self._left = min(again, MEASURED_AGAIN)  # settings to come
        self._chosen = 0  # step of the last choice
        self._known = measurement.fetched  # what the last choice was made from
        self._found: FetchedSums | None = None  # what was measured since
        self._chooser = self._first_chooser = Chooser(aim, self._known.error_table(), steps)

    @property
    def first(self) -> SettingsTable:
        """First settings, as if all steps were alike."""
        return self._first_chooser.alike

    def _next_choice(self) -> int:
        """Step of the next choice, or the number of steps where none follows. The last step alone
        gets none (docs/experiments.md, Choosing anew and measuring again)."""
        following = self._chosen + self._interval
        return following if self._left and following < self._end - 1 else self._end

    @property
    def _measured_step(self) -> int | None:
        """Step where heads are measured for the next choice; None where none follows. In the step
        between them the host works on it (`prepare`), so the GPU never waits."""
        following = self._next_choice()
        return following - 2 if following < self._end else None

    def at(self, step: int) -> SettingsTable:
        """Settings of the next step, which begins. Allocates where it is one to be measured. Waits
        for the GPU where a choice is due that `prepare` has not made."""
        self._choose_if_due(step)
        if step != self._measured_step:
            self._close()
        elif self._open is None:
            self._open = self.again = self._latest.anew()
        self.given.append(self._of(step))
        return self.given[-1]

    def prepare(self, step: int) -> None:
        """Works out what `at` will give for the next step. Call it while the GPU has work left
        (docs/experiments.md, Host time of a choice)."""
        if step < self._end:
            self._choose_if_due(step)
            self._of(step)

    def _close(self) -> None:
        """Ends the measurement of a step that is over."""
        if self._open is not None and any(self._open.blocks_measured):
            self._latest, self._found = self._open, self._open.fetched
        self._open = self.again = None

    def give_up_again(self) -> None:
        """Ends the running measurement for lack of memory: settings go on from the one before."""
        self.again = self._open = None

    def _choose_if_due(self, step: int) -> None:
        """Chooses for this step and those after it, from what was measured since the last choice,
        if anything was."""
        if not self._next_choice() <= step < self._end:
            return
        self._close()
        self._chosen, self._left = step, self._left - 1
        if self._found is not None:
            self._found.fill_from(self._known)
            self._known, self._found = self._found, None
            self._chooser = Chooser(self._aim, self._known.error_table(), self._steps)

    def _of(self, step: int) -> SettingsTable:
        return self._chooser.at(step)
