# SPDX-License-Identifier: Apache-2.0
"""Times at which heads are chosen in a run, and what they are chosen from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparge.tune import Aim, SettingsTable, StepSettings
from sparge.tune.fall import step_means
from sparge.tune.step_settings import PROBED_EVERY, probe_number

LAYERS, HEADS = 2, 3


def choices_of(density: float) -> SettingsTable:
    """Alike in all heads."""
    table, none = torch.ones(LAYERS, HEADS), torch.zeros(LAYERS, HEADS)
    measured = torch.ones(LAYERS).bool()
    return SettingsTable(density * table, none, table, none.int(), none, table, measured)


class Measured:
    """A measurement and its error table. Settings keep the density that is asked for, and a target
    asks for itself. Notes what was worked out, also of what is measured again."""

    kept = np.array([0.0])

    def __init__(self, notes: list[float] | None = None) -> None:
        self.blocks_measured, self.filled, self.later = [0] * LAYERS, None, []
        self.worked_out: list[float] = [] if notes is None else notes

    def anew(self) -> Measured:
        self.later.append(Measured(self.worked_out))
        return self.later[-1]

    def fill_from(self, earlier: Measured) -> None:
        self.filled = earlier

    def error_table(self) -> Measured:
        return self

    def hulls(self, mean_density: float) -> Measured:
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


def run(settings: StepSettings, steps: range) -> tuple[list[int], list[int]]:
    """Steps that choose anew, and those that are measured, each of them with success."""
    due, measured = [], []
    for step in steps:
        if settings.is_due(step):
            due.append(step)
            settings.choose_anew(step)
        settings.at(step)
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
    settings = made("budget", 0.6, steps, measurement=Measured(), again=again)
    assert run(settings, range(steps)) == (due[:again], [step - 1 for step in due[:again]])


def test_of_steps_that_nobody_counted_each_sixteenth_chooses():
    settings = made("quality", 0.1, None, measurement=Measured())
    assert run(settings, range(60)) == ([16, 32], [15, 31])


@pytest.mark.parametrize("due", [6, 7])
def test_what_was_measured_again_replaces_what_was_before(due):
    """It does also where the sampler left out the step of the choice, or ran one twice."""
    first = Measured()
    settings = made("budget", 0.6, 16, measurement=first)
    for step in (0, 3, 5, 5):
        assert not settings.is_due(step)
        settings.at(step)
    (second,) = first.later
    assert settings.again is second
    second.blocks_measured[0] = 4
    assert settings.is_due(due)
    settings.choose_anew(due)
    assert second.filled is first and settings.again is None
    settings.at(due)
    assert not settings.is_due(due)


def test_where_nothing_was_measured_again_the_choices_stay():
    settings = made("budget", 0.6, 16, measurement=Measured())
    before = settings.at(5)
    assert settings.is_due(6)
    settings.choose_anew(6)
    assert settings.at(6) is before


def test_a_mean_density_falls_over_the_whole_run_however_often_heads_are_chosen():
    measured = Measured()
    settings = made("budget", 0.2, 16, measurement=measured)
    given = []
    for step in (0, 0, 1, 5, 6, 9, 12, 15, 17):  # one twice, some left out, one too many
        if settings.is_due(step):
            settings.choose_anew(step)
        given.append(float(settings.at(step).density[0, 0]))
    means = step_means(0.2, 16)
    assert given == pytest.approx([means[min(step, 15)] for step in (0, 0, 1, 5, 6, 9, 12, 15, 17)])
    assert len(settings.given) == len(given)
    assert float(settings.first.density[0, 0]) == pytest.approx(0.2)


def test_what_the_next_step_gets_is_worked_out_ahead():
    """It is not where heads are chosen anew, nor past the end, and never twice."""
    measured = Measured()
    settings = made("budget", 0.2, 8, measurement=measured)
    assert measured.worked_out == []
    settings.at(0)
    settings.prepare(1)
    means = step_means(0.2, 8)
    assert measured.worked_out == means[:2]
    settings.at(1)
    settings.prepare(6)
    settings.prepare(8)
    assert measured.worked_out == means[:2]
    assert float(settings.first.density[0, 0]) == pytest.approx(0.2), "as if all steps were alike"


def test_a_profile_is_what_all_steps_get():
    profile = choices_of(0.4)
    settings = made("quality", 0.1, None, profile=profile)
    assert run(settings, range(40)) == ([], [])
    assert settings.first is profile and {id(given) for given in settings.given} == {id(profile)}


def test_every_layer_is_probed_once_in_some_steps_and_each_time_by_another_number():
    for layer in range(30):
        found = [probe_number(layer, step) for step in range(3 * PROBED_EVERY)]
        assert [number for number in found if number is not None] == [0, 1, 2]
