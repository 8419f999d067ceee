# SPDX-License-Identifier: Apache-2.0
"""Entries of a run that are measured, as tables.

An entry is its conditioning and its step: c, u, d and e are conditionings, b is a batch of c and u;
c1.5 is between steps 1 and 2, c1' again at step 1.
"""

from __future__ import annotations

import pytest

STEPS = 20
CONDITIONINGS = {"c": (0,), "u": (1,), "d": (2,), "e": (3,), "b": (0, 1)}


@pytest.fixture
def measured(load_pack):
    """measured(passes, dense steps): those measured, and the first that may be sparse."""
    window_of = load_pack("sparge.session").SigmaWindow
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


@pytest.mark.parametrize(
    ("dense", "passes", "expected", "sparse_from"),
    [
        # The last dense step, whatever conditionings there are.
        (4, "c0 u0 c1 u1 c2 u2 c3 u3 c4 u4", "c3 u3", "c4"),
        (4, "b0 b1 b2 b3 b4", "c3 u3", "b4"),
        (4, "c0 c1 c2 c3 c4", "c3", "c4"),
        (4, "b0 b1 b2 c3 u3 b4", "c3 u3", "b4"),  # memory got short
        (4, "c0 u0 d0 e0 c1 u1 d1 e1 c2 u2 d2 e2 c3 u3 d3 e3 c4", "c3 u3 d3 e3", "c4"),
        (1, "c0 u0 c1 u1", "c0 u0", "c1"),
        (1, "b0 b1", "c0 u0", "b1"),
        (2, "b0 b1 b2", "c1 u1", "b2"),
        (3, "c0 u0 c1 u1 c2 u2 c3", "c2 u2", "c3"),
        # Without a dense step the first of each conditioning.
        (0, "c0 u0 c1 u1", "c0 u0", "c1"),
        (0, "b0 b1", "c0 u0", "b1"),
        (0, "c0 c0.5 c1", "c0", "c0.5"),
        (0, "c16 u16 c17 u17", "c16 u16", "c17"),
        # Heun: at the level of the next step, and there again.
        (4, "b0 b1 b1' b2 b2' b3 b3' b4 b4'", "c3 u3", "b4"),
        (4, "c0 u0 c1 u1 c1' u1' c2 u2 c2' u2' c3 u3 c3' u3' c4", "c3 u3", "c4"),
        # DPM++ 2S: between the levels.
        (4, "b0 b0.5 b1 b1.5 b2 b2.5 b3 b3.5 b4", "c3 u3", "b4"),
        (4, "c0 u0 c0.5 u0.5 c1 u1 c1.5 u1.5 c2 u2 c2.5 u2.5 c3 u3 c3.5 u3.5 c4", "c3 u3", "c4"),
        # A window that starts between two evaluations.
        (3.4, "b0 b0.5 b1 b1.5 b2 b2.5 b3 b3.5", "c3 u3", "b3.5"),
        # Conditionings that come late or stay away.
        (4, "c0 c1 c2 c3 u3 c4 u4", "c3 u3", "c4"),
        (4, "c0 c1 c2 c3 u4 c4 u5", "c3 u4", "c4"),
        (4, "c0 c1 c2 c3 u4 u5", "c3 u4", "u5"),
        (4, "c0 u0 c1 u1 c2 c3 c4", "c3", "c4"),  # u is over
        (4, "c0 u0 c1 u1 c2 c3 u4 c4", "c3 u4", "c4"),
        # Schedules that go otherwise.
        (4, "c0 u0 c1 u1 c4 u4 c5", "c4 u4", "c5"),  # the last dense steps never come
        (4, "b0 b1 b2 b3 b1' b2' b3' b4", "c3 u3", "b4"),  # back to more noise
        (4, "b0 b1", "", None),  # cancelled
        # Three windows of context, of which one is enough.
        (4, "b0 b0' b0'' b1 b1' b1'' b2 b2' b2'' b3 b3' b3'' b4", "c3 u3", "b4"),
        (4, "c0 u0 c0' u0' c0'' u0'' c4 u4 c4'", "c4 u4", "c4'"),
        (4, "c2 u2 c2' u2' c3 u3 c3' u3' c3'' u3'' c4 u4", "c3 u3", "c4"),
        (1, "c0 u0 c0' u0' c0'' u0'' c1 u1 c1' u1'", "c0 u0", "c1"),
    ],
)
def test_what_is_measured(measured, dense, passes, expected, sparse_from):
    assert measured(passes, dense) == (expected, sparse_from)


@pytest.mark.parametrize(
    ("levels", "dense", "passes", "expected", "sparse_from"),
    [
        (range(18, 0, -1), 4, "b2 b3 b4", "c3 u3", "b4"),
        (range(10, 0, -1), 4, "c10 u10 c11", "c10 u10", "c11"),
        ((), 3, "c0 u0 c1 u1 c2 u2 c3", "c0 u0", "c3"),
    ],
    ids=["starts in the window", "starts past it", "a schedule nobody knows"],
)
def test_other_schedules(measured, levels, dense, passes, expected, sparse_from):
    assert measured(passes, dense, levels) == (expected, sparse_from)


@pytest.fixture
def schedule(load_pack):
    """schedule(*conditionings): that of a run with dense steps of these before the last one."""

    def made(*earlier):
        found = load_pack("sparge.tune.schedule").MeasuringSchedule()
        for conditioning in earlier:
            found.begin_pass(conditioning, may_be_sparse=False, is_last_dense=False)
        return found

    return made


def test_layers_that_were_missed_get_one_more_pass_of_each_conditioning(schedule):
    found = schedule()
    found.begin_pass((0, 1), may_be_sparse=False, is_last_dense=True)
    found.measured()
    assert found.is_done((0, 1), layers_missed=False)
    for one in (0,), (1,):
        assert not found.is_done(one, layers_missed=True)
        found.begin_pass(one, may_be_sparse=True, is_last_dense=False)
        assert found.measuring
        found.measured()
        assert found.is_done(one, layers_missed=True)


@pytest.mark.parametrize(
    ("earlier", "calls", "measurements"),
    [
        ([(0,), (0,)], 2, 1),  # alone, it is measured for two
        ([(0, 1)], 1, 2),
        ([(1,)], 2, 1),
        ([(1,), (0,)], 1, 2),
        ([(0, 1), (2,)], 1, 3),
        ([], 1, 2),  # nothing says whether another conditioning will come
    ],
)
def test_each_conditioning_of_earlier_steps_is_measured(schedule, earlier, calls, measurements):
    found = schedule(*earlier)
    found.begin_pass((0,), may_be_sparse=False, is_last_dense=True)
    assert (found.calls_a_measurement, found.measurements_a_layer) == (calls, measurements)
    found.begin_pass((1,), may_be_sparse=False, is_last_dense=True)
    assert found.calls_a_measurement == calls


def test_before_the_last_dense_step_nothing_is_measured(schedule):
    assert not schedule((0,)).measuring
