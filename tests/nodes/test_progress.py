# SPDX-License-Identifier: Apache-2.0
"""The line under the node while a run goes on."""

from __future__ import annotations

import itertools

import pytest


@pytest.fixture
def shown(load_pack):
    """shown(noise levels, schedule): lines at one pass every two seconds."""

    def run(levels, schedule):
        told, clock = [], itertools.count(0.0, 2.0)

        progress = load_pack("sparge.session").Progress(schedule, told.append, lambda: next(clock))
        for level in levels:
            progress.at(level)
        return told

    return run


SCHEDULE = [1.0, 0.8, 0.5, 0.2]


def test_each_step_tells_the_last_ones_seconds_and_the_rest(shown):
    assert shown(SCHEDULE, SCHEDULE) == [
        "Step 2 of 4: 2.0 s a step, about 6 s left",
        "Step 3 of 4: 2.0 s a step, about 4 s left",
        "Step 4 of 4: 2.0 s a step, about 2 s left",
    ]


def test_a_step_of_several_evaluations_is_one(shown):
    """Between the levels of the schedule, or twice at one."""
    assert len(shown([1.0, 1.0, 0.9, 0.8, 0.8, 0.7], SCHEDULE)) == 1


def test_steps_that_were_skipped_share_the_time(shown):
    assert shown([1.0, 0.2], SCHEDULE) == ["Step 4 of 4: 0.7 s a step, about 1 s left"]


@pytest.mark.parametrize(("levels", "schedule"), [([1.0, 0.5], []), ([0.0, 0.0], SCHEDULE)])
def test_nothing_is_shown_of_what_is_not_known(shown, levels, schedule):
    assert shown(levels, schedule) == []
