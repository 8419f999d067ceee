# SPDX-License-Identifier: Apache-2.0
"""Measuring that the dense calls of a run afford, and that its sparse steps pay for."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest

from sparge.speed.measuring_cost import (
    ALWAYS,
    SHARE,
    WORTH_A_PLAN,
    MeasuringRates,
    affordable,
    pays,
)
from sparge.speed.worth import RATES_FILE, Call, Rates, rates_for

RATES = MeasuringRates(once=1e-3, launch=1e-3, token=1e-9)
ROWS = 10**6
#: Seconds of measurements of one, two and three orders; those of twice as many query blocks share
#: what prepares keys.
SECONDS = {(1, 1): 3e-3, (2, 1): 5e-3, (3, 1): 7e-3, (2, 2): 7.5e-3, (3, 2): 10.5e-3}
AGAIN = {1: 4.5e-3, 3: 10.5e-3}
afford = partial(affordable, RATES, ROWS, 3, measurements=10**6)


@pytest.mark.parametrize(("order_kinds", "calls"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_orders_are_measured_within_a_share_or_where_a_run_is_short(
    order_kinds: int, calls: int
) -> None:
    seconds = SECONDS[order_kinds, calls]
    assert afford(dense=1.001 * seconds / SHARE, calls=calls).order_kinds == order_kinds
    assert afford(dense=0.999 * seconds / SHARE, calls=calls).order_kinds == order_kinds - 1
    assert afford(dense=0.0, calls=calls).order_kinds == 1
    few = int(ALWAYS / seconds)
    assert afford(dense=0.0, measurements=few, calls=calls).order_kinds == order_kinds
    assert afford(dense=0.0, measurements=few + 1, calls=calls).order_kinds < order_kinds
    assert afford(dense=1.0, measurements=few + 1, calls=calls).order_kinds == 3, "the more of both"


@pytest.mark.parametrize("order_kinds", [2, 3])
def test_a_faster_kernel_pays_for_measuring(order_kinds: int) -> None:
    seconds = SECONDS[order_kinds, 1]
    faster = afford(dense=0.0, shorter=1.001 * seconds)
    assert faster.by_faster_kernel and faster.order_kinds == order_kinds
    assert afford(dense=0.0, shorter=0.999 * seconds).order_kinds == order_kinds - 1
    rest = seconds - 1e-3  # paid by the kernel
    assert afford(dense=1.001e-3 / SHARE, shorter=rest).order_kinds == order_kinds
    little = afford(dense=0.9 * seconds / SHARE, shorter=0.9e-3, measurements=100)
    assert little.order_kinds == order_kinds - 1, "what it would save pays for nothing"
    few = int(WORTH_A_PLAN / 1e-3)
    for measurements in (few - 1, few + 1):
        found = afford(dense=0.0, shorter=1e-3, measurements=measurements)
        assert found.by_faster_kernel == (measurements > few), "else it is not worth its plan"


@pytest.mark.parametrize("conditionings", [1, 2])
@pytest.mark.parametrize("order_kinds", [1, 3])
def test_heads_are_measured_again_within_the_same_share(
    order_kinds: int, conditionings: int
) -> None:
    first, again = SECONDS[order_kinds, 1], AGAIN[order_kinds] / conditionings
    run = partial(
        affordable, RATES, ROWS, order_kinds, measurements=10**6, conditionings=conditionings
    )
    for times in (1, 2, 5):
        assert run(dense=1.001 * (first + times * again) / SHARE).again == times
        assert run(dense=0.999 * (first + times * again) / SHARE).again == times - 1
    assert run(dense=0.0).again == 0 and run(dense=math.inf).again > 100


def test_measuring_pays_where_sparse_steps_save_as_much() -> None:
    """A measurement takes 3 ms, and choosing for a head 60 us."""
    run = partial(pays, RATES, ROWS, heads=1000, measurements=100, calls=1, dense=math.inf)
    for steps in (1, 4):
        saved = 0.36 / (100 * steps)
        assert run(saved=1.001 * saved, steps=steps) and not run(saved=0.999 * saved, steps=steps)
    assert not run(saved=-1.3e-3, steps=1000), "sparse is slower"


def test_a_short_call_waits_for_the_host() -> None:
    host = MeasuringRates(once=3e-3, launch=1e-3, token=0.0)
    rates = MeasuringRates(once=1e-3, launch=1e-3, token=0.0, host=host)
    for dense, calls, seconds in ((math.inf, 1, 3e-3), (1e-3, 1, 4e-3), (1e-3, 2, 4.5e-3)):
        assert rates.seconds(ROWS, 2, calls, dense) == pytest.approx(seconds)
    run = partial(affordable, rates, ROWS, 2, measurements=10**6, steps=10**4)
    waiting = 5e-3 / (1 + SHARE * 10**4)  # where what is left to wait for is just allowed
    assert run(dense=1.01 * waiting).order_kinds == 2 and run(dense=0.99 * waiting).order_kinds == 1


def test_rates_of_samples_may_be_missing() -> None:
    fields = json.loads(RATES_FILE.read_text(encoding="utf-8"))["NVIDIA H200"]["head_dims"]["64"]
    assert Rates.read(fields).measuring == MeasuringRates.read(fields["measuring"])
    del fields["measuring"]
    assert Rates.read(fields).measuring is None


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(44776, 24, 128), (17776, 48, 64)])
def test_models_measure_all_orders_with_the_dense_steps_of_our_graphs(
    tokens: int, heads: int, head_dim: int
) -> None:
    """Mochi 6 of 30 steps, CogVideoX-5B 10 of 50, by flash on an H200, in 40 layers and more."""
    rates = rates_for("NVIDIA H200", head_dim)
    assert rates is not None and rates.measuring is not None
    call = Call(tokens, heads, head_dim)
    run = partial(affordable, rates.measuring, call.rows, 3, measurements=80)
    dense = rates.dense_seconds(call, "flash")
    of_steps = [run(dense=steps * dense).order_kinds for steps in range(1, 11)]
    assert of_steps[0] == 1 and of_steps[9] == 3 and of_steps == sorted(of_steps)
