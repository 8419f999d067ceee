# SPDX-License-Identifier: Apache-2.0
"""Times at which heads are chosen in a run, and what they are chosen from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparge.tune import Aim, SettingsTable, StepSettings
from sparge.tune.step_settings import step_means

LAYERS, HEADS = 2, 3


def choices_of(density: float) -> SettingsTable:
    """Alike in all heads."""
    table, none = torch.ones(LAYERS, HEADS), torch.zeros(LAYERS, HEADS)
    measured = torch.ones(LAYERS).bool()
    return SettingsTable(density * table, none, table, none.int(), none, table, measured)


class Measured:
    """A measurement, what is fetched of it and its error table. Settings keep the density that is
    asked for, and a target asks for itself. Notes what was worked out, also of what is measured
    again."""

    kept = np.array([0.0])

    def __init__(self, first: Measured | None = None) -> None:
        self.blocks_measured, self.filled, self.later = [0] * LAYERS, None, []
        self.worked_out: list[float] = [] if first is None else first.worked_out
        self.choices: list[Measured] = [] if first is None else first.choices
        """Measurements that heads were chosen from."""

    def anew(self) -> Measured:
        self.later.append(Measured(self))
        return self.later[-1]

    @property
    def fetched(self) -> Measured:
        return self

    def fill_from(self, earlier: Measured) -> None:
        self.filled = earlier

    def error_table(self) -> Measured:
        self.choices.append(self)
        return self

    def climb(self, mean: float) -> float:
        return mean

    def settings(self, density: float) -> SettingsTable:
        self.worked_out.append(density)
        return choices_of(density)

    def choose(self, *, target: float) -> SettingsTable:
        return self.settings(target)


def made(kind: str, value: float, steps: int | None, **source: Any) -> StepSettings:
    return StepSettings(Aim(kind, value), steps, **source)


def run(settings: StepSettings, first: Measured, steps: range) -> tuple[list[int], list[int]]:
    """Steps with a new choice, and those that are measured, each of them with success."""
    due, measured = [], []
    for step in steps:
        before = len(first.choices)
        settings.at(step)
        due += [step] * (len(first.choices) - before)
        if settings.again is not None:
            measured.append(step)
            settings.again.blocks_measured[0] = 4
    return due, measured


@pytest.mark.parametrize(
    ("steps", "due"),
    [(1, []), (7, []), (8, [6]), (13, [6]), (14, [6, 12]), (16, [6, 12]), (40, [14, 28])],
)
@pytest.mark.parametrize("again", [0, 1, 2, 100])
def test_heads_are_measured_and_chosen_anew_after_each_third(steps, due, again):
    """But not for one step, and as often as is afforded."""
    first = Measured()
    settings = made("budget", 0.6, steps, measurement=first, again=again)
    assert run(settings, first, range(steps)) == (due[:again], [step - 2 for step in due[:again]])


def test_of_steps_that_nobody_counted_each_sixteenth_chooses():
    first = Measured()
    settings = made("quality", 0.1, None, measurement=first)
    assert run(settings, first, range(60)) == ([16, 32], [14, 30])


@pytest.mark.parametrize("due", [6, 7])
@pytest.mark.parametrize("ahead", [True, False])
def test_what_was_measured_again_replaces_what_was_before(due, ahead):
    """It does also where the sampler left out the step of the choice, or ran one twice. The host
    chooses while the GPU computes the step before, if it is asked to."""
    first = Measured()
    settings = made("budget", 0.6, 16, measurement=first)
    for step in (0, 3, 4, 4):
        settings.at(step)
        settings.prepare(step + 1)
    (second,) = first.later
    assert settings.again is second
    second.blocks_measured[0] = 4
    settings.at(5)
    assert settings.again is None and first.choices == [first]
    if ahead:
        settings.prepare(6)
        assert first.choices == [first, second]
    settings.at(due)
    settings.at(due)
    assert first.choices == [first, second] and second.filled is first


def test_where_nothing_was_measured_again_the_choices_stay():
    first = Measured()
    settings = made("budget", 0.6, 16, measurement=first)
    before = settings.at(4)
    settings.at(5)
    assert settings.at(6) is before and first.choices == [first]


def test_a_mean_density_falls_over_the_whole_run_however_often_heads_are_chosen():
    measured = Measured()
    settings = made("budget", 0.2, 16, measurement=measured)
    given = []
    for step in (0, 0, 1, 5, 6, 9, 12, 15, 17):  # one twice, some left out, one too many
        given.append(float(settings.at(step).density[0, 0]))
    means = step_means(0.2, 16)
    assert given == pytest.approx([means[min(step, 15)] for step in (0, 0, 1, 5, 6, 9, 12, 15, 17)])
    assert len(settings.given) == len(given)
    assert float(settings.first.density[0, 0]) == pytest.approx(0.2)


def test_what_the_next_step_gets_is_worked_out_ahead():
    """It is not past the end, and never twice."""
    measured = Measured()
    settings = made("budget", 0.2, 8, measurement=measured)
    assert measured.worked_out == []
    settings.at(0)
    settings.prepare(1)
    means = step_means(0.2, 8)
    assert measured.worked_out == means[:2]
    settings.at(1)
    settings.prepare(8)
    assert measured.worked_out == means[:2]
    assert float(settings.first.density[0, 0]) == pytest.approx(0.2), "as if all steps were alike"
