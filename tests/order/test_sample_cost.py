# SPDX-License-Identifier: Apache-2.0
"""Token orders that the dense calls of a run afford to measure."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import pytest

from sparge.speed.sample_cost import (
    AGAIN_CALLS,
    ALWAYS,
    CHOOSING,
    MORE_BLOCKS,
    SHARE,
    WORTH_A_PLAN,
    SampleRates,
    affordable,
    pays,
)
from sparge.speed.worth import RATES_FILE, Call, Rates, rates_for

RATES = SampleRates(once=1e-3, launch=1e-3, token=1e-9)
ROWS = 10**6  # of which a walk takes 2 ms
MANY = 10**6  # samples
measured = partial(affordable, RATES, ROWS, 3, samples=MANY)


def afforded(**run: Any) -> int:
    """Walks."""
    return measured(**run).walks


def test_each_part_is_its_work_times_its_rate() -> None:
    assert RATES.seconds(ROWS, 3) == pytest.approx(7e-3)
    assert RATES.seconds(2 * ROWS, 1) == pytest.approx(4e-3)
    assert RATES.seconds(ROWS, 3, calls=2) == pytest.approx(7e-3 * (1 + MORE_BLOCKS))


@pytest.mark.parametrize(("walks", "seconds"), [(3, 7e-3), (2, 5e-3)])
def test_a_sample_stays_within_its_share(walks: int, seconds: float) -> None:
    assert afforded(dense=1.001 * seconds / SHARE) == walks
    assert afforded(dense=0.999 * seconds / SHARE) == walks - 1
    alone = seconds * (1 + MORE_BLOCKS)
    assert afforded(dense=1.001 * alone / SHARE, calls=2) == walks
    assert afforded(dense=0.999 * alone / SHARE, calls=2) == walks - 1


def test_more_dense_steps_never_afford_less_and_one_walk_is_the_least() -> None:
    found = [afforded(dense=0.02 * steps) for steps in range(40)]
    assert found == sorted(found) and set(found) == {1, 2, 3}
    assert affordable(RATES, ROWS, 1, dense=0.0, samples=MANY).walks == 1


@pytest.mark.parametrize("walks", [2, 3])
@pytest.mark.parametrize("calls", [1, 2])
def test_short_runs_measure_all_of_them(walks: int, calls: int) -> None:
    few = int(ALWAYS / RATES.seconds(ROWS, walks, calls))
    assert afforded(dense=0.0, samples=few, calls=calls) == walks
    assert afforded(dense=0.0, samples=few + 1, calls=calls) < walks
    assert afforded(dense=1.0, samples=few + 1, calls=calls) == 3, "the more of both"


@pytest.mark.parametrize(("walks", "seconds"), [(3, 7e-3), (2, 5e-3)])
def test_a_faster_kernel_pays_for_measuring(walks: int, seconds: float) -> None:
    faster = measured(dense=0.0, shorter=1.001 * seconds)
    assert faster.by_faster_kernel and faster.walks == walks
    assert afforded(dense=0.0, shorter=0.999 * seconds) == walks - 1
    rest = seconds - 1e-3  # paid by the kernel
    assert afforded(dense=1.001e-3 / SHARE, shorter=rest) == walks
    assert afforded(dense=0.999e-3 / SHARE, shorter=rest) == walks - 1


def test_a_kernel_that_saves_little_in_all_is_not_worth_its_plan() -> None:
    assert not measured(dense=0.0).by_faster_kernel
    shorter, few = 1e-3, int(WORTH_A_PLAN / 1e-3)
    run = partial(affordable, RATES, ROWS, 3, dense=0.0, shorter=shorter)
    assert run(samples=few + 1).by_faster_kernel and not run(samples=few - 1).by_faster_kernel
    slow = partial(affordable, SampleRates(1.0, 1.0, 0.0), ROWS, 3, dense=0.0, samples=few - 1)
    assert slow(shorter=shorter) == slow(), "what it would save pays for nothing"


@pytest.mark.parametrize("conditionings", [1, 2])
@pytest.mark.parametrize(("walks", "enough"), [(1, 3e-3), (3, 7e-3)])
def test_heads_are_measured_again_within_the_same_share(
    walks: int, enough: float, conditionings: int
) -> None:
    again = RATES.seconds(ROWS, walks, AGAIN_CALLS) / conditionings
    afford = partial(affordable, RATES, ROWS, walks, samples=MANY, conditionings=conditionings)
    for times in (1, 2, 5):
        assert afford(dense=1.001 * (enough + times * again) / SHARE).again == times
        assert afford(dense=0.999 * (enough + times * again) / SHARE).again == times - 1
    assert afford(dense=0.0).again == 0 and afford(dense=math.inf).again > 100
    assert affordable(RATES, ROWS, walks, dense=0.0, samples=1).again, "a short run"


@pytest.mark.parametrize("calls", [1, 2])
def test_measuring_pays_where_sparse_steps_save_as_much(calls: int) -> None:
    heads, samples, saved = 1000, 100, 1.3e-3
    cost = samples * RATES.seconds(ROWS, 1, calls) + heads * CHOOSING
    steps = cost / (samples * saved)
    run = partial(pays, RATES, ROWS, heads=heads, samples=samples, calls=calls, dense=math.inf)
    assert run(saved=saved, steps=int(steps) + 1) and not run(saved=saved, steps=int(steps))
    assert not run(saved=-saved, steps=1000), "sparse is slower"


def test_a_short_call_waits_for_the_host() -> None:
    host = SampleRates(once=3e-3, launch=1e-3, token=0.0)
    rates = SampleRates(once=1e-3, launch=1e-3, token=0.0, host=host)
    assert rates.seconds(ROWS, 2) == pytest.approx(3e-3), "in a call that is long enough"
    assert rates.seconds(ROWS, 2, dense=1e-3) == pytest.approx(4e-3)
    assert rates.seconds(ROWS, 2, dense=2.5e-3) == pytest.approx(3e-3)
    assert rates.seconds(ROWS, 2, calls=2, dense=1e-3) == pytest.approx(4.5e-3), (
        "the longer of both"
    )
    run = partial(affordable, rates, ROWS, 2, samples=MANY, steps=10**4)
    assert run(dense=4e-3 / SHARE / 10**4).walks == 1
    waiting = 5e-3 / (1 + SHARE * 10**4)  # where what is left to wait for is just allowed
    assert run(dense=1.01 * waiting).walks == 2 and run(dense=0.99 * waiting).walks == 1


def test_rates_of_samples_may_be_missing() -> None:
    fields = json.loads(RATES_FILE.read_text(encoding="utf-8"))["NVIDIA H200"]["head_dims"]["64"]
    assert Rates.read(fields).sample == SampleRates.read(fields["sample"])
    del fields["sample"]
    assert Rates.read(fields).sample is None


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(44776, 24, 128), (17776, 48, 64)])
def test_models_measure_all_walks_with_the_dense_steps_of_our_graphs(
    tokens: int, heads: int, head_dim: int
) -> None:
    """Mochi 6 of 30 steps, CogVideoX-5B 10 of 50, by flash on an H200, in 40 layers and more."""
    rates = rates_for("NVIDIA H200", head_dim)
    assert rates is not None and rates.sample is not None
    call = Call(tokens, heads, head_dim)
    dense = rates.dense_seconds(call, "flash")
    of_steps = [
        affordable(rates.sample, call.rows, 3, dense=steps * dense, samples=80).walks
        for steps in range(1, 11)
    ]
    assert of_steps[0] == 1 and of_steps[9] == 3 and of_steps == sorted(of_steps)
