# SPDX-License-Identifier: Apache-2.0
"""Times at which heads are chosen in a run, and what they are chosen from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparge.tune import Aim, Alternating, HeadChoices, StepChoices
from sparge.tune.step_choices import REPORTED_LAYERS

LAYERS, HEADS = 2, 3


def choices_of(density: float, error: float) -> HeadChoices:
    """Alike in all heads."""
    table, none = torch.ones(LAYERS, HEADS), torch.zeros(LAYERS, HEADS)
    measured = torch.ones(LAYERS).bool()
    return HeadChoices(
        density * table, none, table, none.int(), none.int(), error * table, table, measured
    )


def alternating_of(density: float, error: float) -> Alternating:
    """Choices for both kinds of steps that are equal, in two objects."""
    return Alternating.of(choices_of(density, error), choices_of(density, error))


@pytest.fixture
def freezes():
    """A calibration, and its own offers, that notes what it is asked for, and gives every wanted
    step of a mean its number. Measured again it goes on in the same notes; `samples` are those of
    its layers."""

    class Freezes(list):
        samples, filled, walks = [0] * LAYERS, None, [0]

        def __bool__(self):
            return True  # however few notes

        def anew(self):
            self.again = Again(self)
            return self.again

        def fill_from(self, earlier):
            self.filled = earlier

        def offers(self):
            return self

        def freeze_steps(self, mean_density, steps, *, wanted, drift):
            self.append((wanted.start, drift))
            of_steps = [alternating_of(0.01 * step, 0.1) for step in wanted if step < steps]
            return alternating_of(mean_density, 0.1), of_steps if mean_density < 0.5 else []

        def freeze(self, *, target, drift, dropping):
            if not dropping:
                self.append((0, drift))
            return choices_of(0.3, target)

    class Again(Freezes):
        def __init__(self, notes):
            super().__init__()
            self.append, self.samples = notes.append, [0] * LAYERS

    return Freezes()


def made(kind: str, value: float, *steps: int | None, **source: Any) -> StepChoices:
    return StepChoices(Aim(kind, value), *steps, **source)


@pytest.mark.parametrize(
    ("steps", "anew"),
    [
        (1, []),
        (3, []),
        (4, []),
        (5, [3]),
        (16, [3, 6, 9, 12]),
        (17, [3, 6, 9, 12, 15]),
        (40, [7, 14, 21, 28, 35]),
        (None, [8, 16, 24, 32]),
    ],
)
def test_heads_are_chosen_anew_after_each_sixth_but_not_for_one_step(freezes, steps, anew):
    choices = made("budget", 0.6, steps, calibration=freezes)
    due = []
    for step in range(steps or 40):
        if choices.is_due(step):
            due.append(step)
            choices.choose_anew(step, torch.ones(LAYERS, HEADS))
        choices.at(step)
    assert due == anew == [first for first, _ in freezes[1:]]
    assert freezes[0] == (0, None)


def test_what_the_next_step_gets_is_worked_out_ahead():
    """Worked out for the kind of step that comes; not where heads are chosen anew, nor past the
    end."""
    worked_out: list[tuple[int | None, bool]] = []

    def noting(step: int | None) -> Alternating:
        def work_out(dropping: bool) -> HeadChoices:
            worked_out.append((step, dropping))
            return choices_of(0.1, 0.1)

        return Alternating(work_out)

    class Offers:
        walks = (0,)

        def freeze_steps(self, mean_density, steps, *, wanted, drift):
            return noting(None), [noting(step) for step in wanted if step < steps]

    class Measured:
        def offers(self):
            return Offers()

    choices = made("budget", 0.2, 5, calibration=Measured(), again=0)
    assert not worked_out
    first = choices.at(0)
    assert worked_out == [(0, False)]
    choices.prepare(1)
    assert worked_out == [(0, False), (1, True)]
    assert choices.at(1) is not first
    choices.prepare(2)
    choices.at(2)
    assert worked_out[2:] == [(2, False)], "once"
    assert choices.is_due(3)
    choices.prepare(3)
    assert len(worked_out) == 3
    choices.choose_anew(3, torch.ones(LAYERS, HEADS))
    for step in (3, 4):
        choices.at(step)
        choices.prepare(step + 1)
    assert worked_out[3:] == [(3, True), (4, False)]


def visits(choices: StepChoices, steps: range, layer: int = 0) -> list[tuple[int, int]]:
    """Visits of a layer: steps and numbers."""
    found = [(step, choices.visit(layer, step)) for step in steps]
    return [(step, number) for step, number in found if number is not None]


@pytest.mark.parametrize(("steps", "groups"), [(16, 1), (20, 2), (25, 2), (32, 3), (40, 3)])
def test_layers_are_probed_twice_before_a_choice_that_goes_by_it(freezes, steps, groups):
    """The probes are in a step of either kind, each in another variant. One more comes after the
    last choice, for the report, to layers whose turn it is."""
    choices = made("budget", 0.6, steps, calibration=freezes)
    sixth = choices.interval
    assert sixth // 2 == groups
    for layer in range(groups):
        found = visits(choices, range(sixth), layer)
        last = sixth - 1 - 2 * layer
        assert found == [(last - 1, 0), (last, 1)]
    assert visits(choices, range(sixth), groups) == visits(choices, range(sixth))
    choices.choose_anew(sixth, torch.ones(LAYERS, HEADS))
    assert len(visits(choices, range(sixth, 2 * sixth))) == 1, "heads are measured again"
    last = (steps - 2) // sixth
    for choice in range(2, last + 1):
        choices.choose_anew(choice * sixth, torch.ones(LAYERS, HEADS))
    rest = range(last * sixth, steps)
    layer = last // 2 % REPORTED_LAYERS * len(rest)
    ((_, number),) = visits(choices, rest, layer)
    assert number == 2 * last, "other query blocks each time"
    assert visits(choices, rest, layer + len(rest)) == []


def test_layers_are_probed_once_where_no_choice_goes_by_it(freezes):
    short = made("budget", 0.6, 3, calibration=freezes)
    assert [len(visits(short, range(3))), len(visits(short, range(3, 6)))] == [1, 1]
    assert [short.visit(layer, 2) for layer in range(12)] == [0, *[None] * 11]
    assert sum(len(visits(short, range(3), layer)) for layer in range(12)) == 3
    for steps in (0, 1):  # a sampler may take one more than its schedule says
        of_one = made("budget", 0.6, steps, calibration=freezes)
        assert [of_one.visit(layer, 0) for layer in range(5)] == [0, None, None, None, 0]


def test_probes_for_the_report_come_to_all_layers_by_turns(freezes):
    choices = made("budget", 0.6, 18, calibration=freezes)
    seen = {}
    for number in range(6):
        if number:
            choices.choose_anew(3 * number, torch.ones(LAYERS, HEADS))
        steps = range(3 * number, 3 * number + 3)
        seen[number] = {layer for layer in range(12) if visits(choices, steps, layer)}
    assert seen[1] == {0, 1, 2} and seen[3] == {3, 4, 5} and seen[5] == {6, 7, 8}
    assert all(len(seen[number]) == 12 for number in (0, 2, 4)), "choices go by these"


def test_where_a_profile_gives_the_choices_each_of_them_has_probes_of_its_own():
    choices = made("budget", 0.4, 18, profile=alternating_of(0.4, 0.1))
    seen = []
    for number in range(6):
        if number:
            choices.choose_anew(3 * number, torch.ones(LAYERS, HEADS))
        steps = range(3 * number, 3 * number + 3)
        seen.append({layer for layer in range(12) if visits(choices, steps, layer)})
    assert seen[:4] == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10, 11}] and seen[4:] == seen[:2]


def test_a_step_keeps_its_place_in_a_falling_mean(freezes):
    choices = made("budget", 0.2, 16, calibration=freezes)
    given = []
    for step in (0, 0, 1, 3, 4, 5, 15, 17):  # some evaluated twice, some left out, one too many
        if choices.is_due(step):
            choices.choose_anew(step, torch.ones(LAYERS, HEADS))
        given.append(round(100 * float(choices.at(step).density[0, 0])))
    assert given == [0, 0, 1, 3, 4, 5, 15, 15]
    assert len(choices.given) == len(given)
    assert float(choices.first.pooling.density[0, 0]) == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ["budget", "quality"])
def test_errors_are_expected_to_go_on_as_they_went(freezes, kind):
    """Found: 2 after 2.5 steps, 4.5 after 4 more, and the same once more."""
    choices = made(kind, 0.1, 16, calibration=freezes, again=0)
    after_the_first = 2 * 2 ** (0.25 * 4 / 2.5)
    after_the_second = 4.5 * (4.5 / 2) ** 0.25
    for step, drift in ((4, 2), (8, 4.5 / after_the_first), (12, 4.5 / after_the_second)):
        for before in range(step - 4, step):
            choices.at(before)
        choices.choose_anew(step, torch.full((LAYERS, HEADS), float(drift)))
    choices.at(12)
    (_, first), *anew = freezes
    assert first is None
    found = [float(drift.unique()) for _, drift in anew]
    assert found == pytest.approx([after_the_first, after_the_second, 4.5])


def test_heads_of_a_profile_get_denser_where_they_miss_what_was_expected():
    drift = torch.tensor([[1.0, 1.4, 1.6], [0.2, 5, 1]])
    choices = made("quality", 0.1, None, profile=alternating_of(0.4, 0.3))
    choices.choose_anew(8, drift)
    expected = torch.tensor([[0.4, 0.4, 0.6], [0.4, 0.6, 0.4]])
    for step in (8, 9):
        torch.testing.assert_close(choices.at(step).density, expected)
    choices.choose_anew(16, drift)
    choices.choose_anew(24, drift)
    assert float(choices.at(24).density.max()) == 1
    assert torch.equal(choices.first.pooling.density, torch.full((LAYERS, HEADS), 0.4))


def test_the_contrast_of_denser_heads_shrinks_with_what_they_drop():
    of_one = choices_of(0.4, 0.3)
    of_one = replace(of_one, contrast=2 * of_one.contrast)
    choices = made("quality", 0.1, None, profile=Alternating.of(of_one, of_one))
    drift = torch.tensor([[1.0, 1.4, 1.6], [0.2, 5, 1]])
    choices.choose_anew(8, drift)
    after = 1 + (1 - 0.6) / (1 - 0.4)
    expected = torch.tensor([[2, 2, after], [2, after, 2]])
    torch.testing.assert_close(choices.at(8).contrast, expected)
    choices.choose_anew(16, drift)
    choices.choose_anew(24, drift)
    assert choices.at(24).contrast[1, 1] == 1, "it drops nothing"


def test_a_profile_for_a_mean_density_stays_as_it_is():
    choices = made("budget", 0.4, None, profile=alternating_of(0.4, 0.1))
    choices.choose_anew(8, torch.full((LAYERS, HEADS), 5.0))
    assert choices.at(8) is choices.first.pooling and choices.at(9) is choices.first.dropping


@pytest.mark.parametrize("aim", [("budget", 0.6), ("budget", 0.2), ("quality", 0.1)])
@pytest.mark.parametrize("steps", [range(16), range(0, 16, 2), range(1, 16, 2), (0, 1, 2, 6, 7)])
def test_steps_that_run_take_turns(freezes, aim, steps):
    """Whatever the sampler leaves out, or a node that caches, and whenever heads were chosen."""
    choices = made(*aim, 16, calibration=freezes)
    for count, step in enumerate(steps):
        if choices.is_due(step):
            choices.choose_anew(step, torch.ones(LAYERS, HEADS).double())
        kinds = choices._of_steps or [choices._now]
        given = choices.at(step)
        assert any(given is (kind.dropping if count % 2 else kind.pooling) for kind in kinds)


def test_drift_is_of_the_walks_that_probes_saw(freezes):
    """Layers 0 and 1 are seen in the last two of six steps, and the two before."""
    freezes.walks = [0, 1, 2]
    choices = made("budget", 0.6, 32, calibration=freezes)
    for step in range(6):
        choices.at(step)
        choices.given[-1].walk.fill_([0, 0, 1, 1, 2, 2][step])
        choices._since[step] = replace(choices.given[-1], walk=choices.given[-1].walk.clone())
    choices.choose_anew(6, torch.full((LAYERS, HEADS), 4.0).double())
    grown = choices._drift.grown
    assert grown is not None and grown[:, 0].tolist() == [[2, 2, 4], [2, 4, 2]]


@pytest.mark.parametrize(
    ("steps", "measured"),
    [(7, []), (8, [5]), (13, [5]), (14, [5, 11]), (16, [5, 11]), (40, [13, 27])],
)
@pytest.mark.parametrize("again", [0, 1, 2, 100])
def test_steps_before_the_third_and_the_fifth_choice_are_measured(freezes, steps, measured, again):
    """The first of them where only so many samples are afforded."""
    choices = made("budget", 0.6, steps, calibration=freezes, again=again)
    open_in = []
    for step in range(steps):
        if choices.is_due(step):
            choices.choose_anew(step, torch.full((LAYERS, HEADS), 2.0, dtype=torch.float64))
        choices.at(step)
        if choices.again is not None:
            open_in.append(step)
    assert open_in == measured[:again]


@pytest.mark.parametrize("due", [6, 7])
def test_what_was_measured_again_replaces_the_drift(freezes, due):
    """It does also where the sampler left out the step of the choice."""
    choices, two = made("budget", 0.6, 16, calibration=freezes), torch.full((LAYERS, HEADS), 2.0)
    for step in (0, 3, 5, due, 10):
        if choices.is_due(step):
            choices.choose_anew(step, two.double())
        choices.at(step)
        if choices.again is not None:
            choices.at(step)
            assert choices.again is freezes.again, "also where a step runs twice"
            choices.again.samples[0] = 4
    firsts, drifts = zip(*freezes, strict=True)
    assert firsts == (0, 3, due, 10)
    assert freezes.again.filled is freezes
    assert drifts[2] is None, "the new measurement knows"
    assert (drifts[1] > 2).all() and (drifts[3] > 2).all(), "and drifts in its turn"


def test_without_a_sample_the_drift_goes_on(freezes):
    choices = made("budget", 0.6, 16, calibration=freezes)
    for step in range(7):
        if choices.is_due(step):
            choices.choose_anew(step, torch.full((LAYERS, HEADS), 2.0, dtype=torch.float64))
        choices.at(step)
    assert freezes[-1][0] == 6 and freezes[-1][1] is not None and freezes.again.filled is None
