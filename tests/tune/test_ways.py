# SPDX-License-Identifier: Apache-2.0
"""Which way a call is computed, by a table of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparge.blocks import KEY_BLOCK
from sparge.speed import Cost, SpeedTable, Times
from sparge.speed.measuring_cost import (
    AGAIN_CALLS,
    ALWAYS,
    CHOOSING,
    HOST,
    SHARE,
    Afforded,
    MeasuringCost,
)
from sparge.speed.table import FEWEST_TOKENS, Size
from sparge.tune import Call, Ways
from sparge.tune.ways import NEVER, RunLength

TOKENS, HEADS = 4096, 2
PAIRS = HEADS * TOKENS**2
FREE = Cost(0.0, 0.0, 0.0, 0.0)


def of_pairs(seconds: float) -> Cost:
    """A way that takes so long for all pairs of a call."""
    return replace(FREE, pair=seconds / PAIRS)


def ways(exact: float = 1.0, eight_bit: float = 0.5, sparse: float = 1.0, **named: bool) -> Ways:
    times = Times(of_pairs(exact), of_pairs(eight_bit), of_pairs(sparse), margin=0.0)
    table = SpeedTable({}, "", {64: times})
    return Ways(lambda device: table, **{"exact_dense": False} | named)


def call_of(
    tokens: int = TOKENS,
    keys: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_heads: int = HEADS,
    head_dim: int = 64,
    batch: int = 1,
) -> Call:
    zero = torch.zeros(1, 1, 1, 1, dtype=dtype)
    k = zero.expand(batch, kv_heads, keys or tokens, head_dim)
    return Call(zero.expand(batch, HEADS, tokens, head_dim), k, k)


def test_dense_calls_are_in_eight_bits_where_that_is_faster() -> None:
    assert ways().choice(call_of()).eight_bit_dense
    assert not ways(eight_bit=1.1).choice(call_of()).eight_bit_dense
    assert not ways(exact_dense=True).choice(call_of()).eight_bit_dense


UNKNOWN = (
    call_of(FEWEST_TOKENS - 1),
    call_of(dtype=torch.float32),
    call_of(head_dim=96),
)


@pytest.mark.parametrize("call", UNKNOWN, ids=["short", "float32", "head_dim"])
def test_of_other_calls_nothing_is_known(call: Call) -> None:
    """They are dense exact, sparse as asked, and measured in full."""
    slow = ways(sparse=100.0)
    assert not slow.choice(call).eight_bit_dense
    assert slow.choice(call).break_even == NEVER
    found = slow.affordable(call, 3, run=RunLength(10**9, 1), conditionings=2, calls=1, least=0.0)
    assert found.order_kinds == 3 and found.pays


def test_without_a_table_nothing_is_known() -> None:
    nothing = Ways(exact_dense=False)
    assert not nothing.choice(call_of()).eight_bit_dense
    assert nothing.choice(call_of()).break_even == NEVER


def test_a_debugging_aid_hides_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARGE_REFERENCE", "1")
    assert not ways().choice(call_of()).eight_bit_dense
    assert ways(sparse=100.0).choice(call_of()).break_even == NEVER


def test_cross_attention_is_exact() -> None:
    assert not ways().choice(call_of(keys=TOKENS // 2)).eight_bit_dense


@pytest.mark.parametrize(
    ("found", "density"),
    [
        (ways(), 0.5),
        (ways(exact_dense=True), 1.0),
        (ways(eight_bit=2.0), 1.0),
        (ways(exact=0.4), 0.4),
    ],
)
def test_sparse_has_to_beat_the_faster_dense_way(found: Ways, density: float) -> None:
    choice = found.choice(call_of())
    assert choice.break_even == pytest.approx((density, density - 1 / KEY_BLOCK))
    reason = f"at 4,096 tokens sparse is faster only below {100 * density:.0f} % density"
    assert choice.why_slower(pools=False) == reason
    assert found.choice(call_of(batch=4)).break_even == choice.break_even
    assert replace(found, even_if_slower=True).choice(call_of()).break_even == NEVER


def test_what_can_never_be_faster() -> None:
    choice = ways(sparse=1000.0).choice(call_of())
    assert choice.why_slower(pools=False) == "at 4,096 tokens sparse would be slower"


# One order takes 1 ms, and choosing for a head 60 us.
SPARSE = Cost(host=0.0, launch=0.25e-3, token=0.0, pair=0.0)
SIZE = Size(TOKENS, HEADS, 64)
MANY = 10**6


def cost(calls: int = 1, dense: float = 1.0, host: float = 0.0) -> MeasuringCost:
    return MeasuringCost(replace(SPARSE, host=host), SIZE, dense, calls)


def orders(saved: float, calls: int = 1, measurements: int = MANY) -> int:
    found = cost(calls).affordable(3, saved=saved, measurements=measurements, conditionings=1)
    return found.order_kinds


@pytest.mark.parametrize(("kinds", "calls"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_orders_are_measured_within_a_share_or_where_a_run_is_short(kinds: int, calls: int) -> None:
    seconds = kinds * (1e-3 if calls == 1 else 1.5e-3)
    assert orders(1.001 * seconds / SHARE, calls) == kinds
    assert orders(0.999 * seconds / SHARE, calls) == kinds - 1
    assert orders(0.0, calls) == 1, "at least one"
    few = int(ALWAYS / seconds)
    assert orders(0.0, calls, few) == kinds and orders(0.0, calls, few + 1) < kinds


@pytest.mark.parametrize("conditionings", [1, 2])
def test_heads_are_measured_again_within_the_same_share(conditionings: int) -> None:
    first, again = 1e-3, cost().seconds(1, AGAIN_CALLS) / conditionings
    for times in (1, 2, 5):
        for off, found in ((1.001, times), (0.999, times - 1)):
            saved = off * (first + times * again) / SHARE
            of_run = cost().affordable(
                1, saved=saved, measurements=MANY, conditionings=conditionings
            )
            assert of_run.again == found


def test_a_short_call_waits_for_the_host() -> None:
    host = 4e-3 / HOST
    for dense, calls, seconds in ((1.0, 1, 2e-3), (1e-3, 1, 3e-3), (1e-3, 4, 5e-3)):
        assert cost(calls, dense, host).seconds(2) == pytest.approx(seconds)


def test_measuring_pays_where_sparse_steps_save_as_much() -> None:
    saved = (100 * 1e-3 + 1000 * CHOOSING) / 100
    for off, pays in ((1.001, True), (0.999, False), (-1.0, False)):
        assert cost().pays(heads=1000, measurements=100, saved=off * saved) == pays


def test_a_run_affords_what_its_sparse_steps_save() -> None:
    """A call saves 0.5 s, and a measurement takes 0.04 s for each order."""
    sparse = Cost(host=0.0, launch=0.01, token=0.0, pair=0.0)
    times = Times(of_pairs(1.0), of_pairs(0.51), sparse, margin=0.0)
    found = Ways(lambda device: SpeedTable({}, "", {64: times}), exact_dense=False)

    def afforded(steps: int | None, call: Call) -> Afforded:
        run = RunLength(10**6, steps)
        return found.affordable(call, 3, run=run, conditionings=1, calls=1, least=0.0)

    assert [afforded(steps, call_of()).order_kinds for steps in (1, 3, 4, 5)] == [1, 1, 2, 3]
    assert [afforded(steps, call_of()).again for steps in (5, 12, 20)] == [0, 1, 2]
    assert [afforded(steps, call_of()).pays for steps in (0, 1, None)] == [False, True, True]
    assert afforded(None, call_of()) == afforded(16, call_of())
    assert afforded(4, call_of(batch=2)) == afforded(4, call_of()), "a batch is one entry"
    assert afforded(1, call_of(kv_heads=1)).order_kinds == 3, "they share their order anyway"
