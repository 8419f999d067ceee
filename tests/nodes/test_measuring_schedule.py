# SPDX-License-Identifier: Apache-2.0
"""Entries of a run that are measured, as tables.

An entry is its conditioning and its step: c, u, d and e are conditionings, b is a batch of c and u;
c1.5 is between steps 1 and 2, c1' again at step 1.
"""

from __future__ import annotations

from functools import partial

import pytest

STEPS = 20
runs = partial(pytest.mark.parametrize, ("passes", "expected", "sparse_from"))
CONDITIONINGS = {"c": (0,), "u": (1,), "d": (2,), "e": (3,), "b": (0, 1)}


@pytest.fixture
def measured(load_pack):
    """measured(passes, dense steps): those measured, and the first that may be sparse."""
    window_of = load_pack("sparge.tune").SigmaWindow
    new_schedule = load_pack("sparge.tune.schedule").MeasuringSchedule

    def run(passes: str, dense: float, levels=range(STEPS, 0, -1)) -> tuple[str, str | None]:
        window = window_of(start=STEPS - dense if dense else float("inf"), end=0.0)
        schedule, found = new_schedule(), []
        for name in passes.split():
            conditioning = CONDITIONINGS[name[0]]
            level = STEPS - float(name[1:].rstrip("'"))
            may_be_sparse = level <= window.start
            if may_be_sparse and schedule.is_done(conditioning, layers_missed=False):
                return " ".join(found), name
            schedule.begin_pass(conditioning, may_be_sparse, window.is_last_dense(level, levels))
            if schedule.measuring:
                schedule.measured()
                schedule.measured()  # of a second layer: still one sample of each
            found += ["cude"[conditioning[place]] + name[1:] for place in schedule.measuring]
        return " ".join(found), None

    return run


@runs(
    [
        ("c0 u0 c1 u1 c2 u2 c3 u3 c4 u4", "c3 u3", "c4"),
        ("b0 b1 b2 b3 b4", "c3 u3", "b4"),
        ("c0 c1 c2 c3 c4", "c3", "c4"),
        ("b0 b1 b2 c3 u3 b4", "c3 u3", "b4"),  # memory got short
        ("c0 u0 d0 c1 u1 d1 c2 u2 d2 c3 u3 d3 c4", "c3 u3 d3", "c4"),
        ("c0 u0 d0 e0 c1 u1 d1 e1 c2 u2 d2 e2 c3 u3 d3 e3 c4", "c3 u3 d3 e3", "c4"),
    ],
)
def test_the_last_of_four_dense_steps(measured, passes, expected, sparse_from):
    assert measured(passes, dense=4) == (expected, sparse_from)


@pytest.mark.parametrize(
    ("dense", "passes", "expected", "sparse_from"),
    [
        (1, "c0 u0 c1 u1", "c0 u0", "c1"),
        (1, "b0 b1", "c0 u0", "b1"),
        (2, "b0 b1 b2", "c1 u1", "b2"),
        (3, "b0 b1 b2 b3", "c2 u2", "b3"),
        (2, "c0 u0 c1 u1 c2", "c1 u1", "c2"),
        (3, "c0 u0 c1 u1 c2 u2 c3", "c2 u2", "c3"),
    ],
)
def test_short_windows(measured, dense, passes, expected, sparse_from):
    assert measured(passes, dense) == (expected, sparse_from)


@runs(
    [
        ("c0 u0 c1 u1", "c0 u0", "c1"),
        ("b0 b1", "c0 u0", "b1"),
        ("c0 c0.5 c1", "c0", "c0.5"),
        ("c16 u16 c17 u17", "c16 u16", "c17"),
    ],
)
def test_without_dense_steps_the_first_of_each_conditioning(
    measured, passes, expected, sparse_from
):
    assert measured(passes, dense=0) == (expected, sparse_from)


def test_a_run_that_starts_in_the_window_or_past_it(measured):
    assert measured("b2 b3 b4", dense=4, levels=range(18, 0, -1)) == ("c3 u3", "b4")
    assert measured("c10 u10 c11", dense=4, levels=range(10, 0, -1)) == ("c10 u10", "c11")


@runs(
    [
        # Heun: at the level of the next step, and there again.
        ("b0 b1 b1' b2 b2' b3 b3' b4 b4'", "c3 u3", "b4"),
        ("c0 u0 c1 u1 c1' u1' c2 u2 c2' u2' c3 u3 c3' u3' c4", "c3 u3", "c4"),
        # DPM++ 2S: between the levels.
        ("b0 b0.5 b1 b1.5 b2 b2.5 b3 b3.5 b4", "c3 u3", "b4"),
        ("c0 u0 c0.5 u0.5 c1 u1 c1.5 u1.5 c2 u2 c2.5 u2.5 c3 u3 c3.5 u3.5 c4", "c3 u3", "c4"),
        # Conditionings that come late or stay away.
        ("c0 c1 c2 c3 u3 c4 u4", "c3 u3", "c4"),
        ("c0 c1 c2 c3 u4 c4 u5", "c3 u4", "c4"),
        ("c0 c1 c2 c3 u4 u5", "c3 u4", "u5"),
        ("c0 u0 c1 u1 c2 c3 c4", "c3", "c4"),  # u is over
        ("c0 u0 c1 u1 c2 c3 u4 c4", "c3 u4", "c4"),
        # Schedules that go otherwise.
        ("c0 u0 c1 u1 c4 u4 c5", "c4 u4", "c5"),  # the last dense steps never come
        ("c0 u0 c4 u4 c5", "c4 u4", "c5"),
        ("b0 b1 b2 b3 b1' b2' b3' b4", "c3 u3", "b4"),  # back to more noise
        ("b0 b1", "", None),  # cancelled
        # Three windows of context.
        ("b0 b0' b0'' b1 b1' b1'' b2 b2' b2'' b3 b3' b3'' b4", "c3 u3", "b4"),
        ("c0 u0 c0' u0' c0'' u0'' c4 u4 c4'", "c4 u4", "c4'"),
    ],
)
def test_four_dense_steps_in_whatever_way_they_come(measured, passes, expected, sparse_from):
    assert measured(passes, dense=4) == (expected, sparse_from)


def test_a_window_that_starts_between_two_evaluations(measured):
    passes = "b0 b0.5 b1 b1.5 b2 b2.5 b3 b3.5"
    assert measured(passes, dense=3.4) == ("c3 u3", "b3.5")


def test_one_window_of_context_is_enough(measured):
    step = "c{0} u{0} c{0}' u{0}' c{0}'' u{0}'' "
    passes = "".join(step.format(number) for number in range(5))
    assert measured(passes, dense=4) == ("c3 u3", "c4")
    assert measured(passes, dense=1) == ("c0 u0", "c1")


def test_a_schedule_nobody_knows_is_measured_at_once(measured):
    assert measured("c0 u0 c1 u1 c2 u2 c3", dense=3, levels=()) == ("c0 u0", "c3")


def test_layers_that_were_missed_get_one_more_pass_of_each_conditioning(load_pack):
    schedule = load_pack("sparge.tune.schedule").MeasuringSchedule()
    schedule.begin_pass((0, 1), may_be_sparse=False, is_last_dense=True)
    schedule.measured()
    assert schedule.is_done((0, 1), layers_missed=False)
    for one in (0,), (1,):
        assert not schedule.is_done(one, layers_missed=True)
        schedule.begin_pass(one, may_be_sparse=True, is_last_dense=False)
        assert schedule.measuring
        schedule.measured()
        assert schedule.is_done(one, layers_missed=True)


@pytest.mark.parametrize(
    ("earlier", "calls"),
    [
        ([(0,), (0,)], 2),
        ([(0, 1)], 1),
        ([(1,), (0,)], 1),
        ([], 1),  # nothing says whether another conditioning will come
    ],
)
def test_a_conditioning_that_is_alone_is_measured_for_two(load_pack, earlier, calls):
    schedule = load_pack("sparge.tune.schedule").MeasuringSchedule()
    for conditioning in earlier:
        schedule.begin_pass(conditioning, may_be_sparse=False, is_last_dense=False)
    for conditioning in (0,), (1,):
        schedule.begin_pass(conditioning, may_be_sparse=False, is_last_dense=True)
        assert schedule.calls_a_measurement == calls


@pytest.mark.parametrize(
    ("earlier", "samples"),
    [([], 2), ([(1,)], 1), ([(0, 1)], 2), ([(1,), (0,)], 2), ([(0, 1), (2,)], 3)],
)
def test_each_conditioning_of_earlier_steps_is_sampled(load_pack, earlier, samples):
    schedule = load_pack("sparge.tune.schedule").MeasuringSchedule()
    for conditioning in earlier:
        schedule.begin_pass(conditioning, may_be_sparse=False, is_last_dense=False)
    schedule.begin_pass((0,), may_be_sparse=False, is_last_dense=True)
    assert schedule.measurements_a_layer == samples


def test_after_the_window_nothing_is_measured(load_pack):
    schedule = load_pack("sparge.tune.schedule").MeasuringSchedule()
    schedule.begin_pass((0,), may_be_sparse=False, is_last_dense=False)
    assert not schedule.measuring
