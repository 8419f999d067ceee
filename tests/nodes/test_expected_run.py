# SPDX-License-Identifier: Apache-2.0
"""Expected time of a run, of round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest


@pytest.fixture
def make(load_pack) -> Any:
    module, speed = load_pack("nodes.expected_run"), load_pack("sparge.speed")

    def run(exact: float = 0.1, eight_bit: float = 0.05, sparse: float = 0.01) -> Any:
        """20 steps of 2 s, of which 10 calls of attention take 1 s."""
        times = speed.ShapeTimes(exact, eight_bit, dict.fromkeys(module.DENSITIES, sparse))
        return module.ExpectedRun(speed.Size(1000, 2, 64), 10, 2.0, times, 20)

    return run


def test_the_first_steps_are_dense_and_the_rest_of_the_model_stays(make) -> None:
    run = make()
    assert run.without == 40
    # 1 s a step beside attention; 2 dense steps of 0.5 s, 18 sparse ones of 0.1 s.
    assert run.seconds(0.2) == pytest.approx(20 + 2 * 0.5 + 18 * 0.1)
    first, second = run.verdict().split("\n")
    assert first == "1.8x faster: 22.8 s, not 40 s"
    assert second == "20 steps, 20 % computed, 1,000 tokens"
    assert max(len(first), len(second)) <= 40
    text = run.details("a GPU")
    assert "Attention is 50 % of a step of 2 s: 10 calls of 1,000 tokens" in text
    assert "without: 100 ms a call" in text and "20 %: 10 ms a call" in text
    assert "Whole run at 10 %: 22.8 s, 1.75 times as fast" in text


@pytest.mark.parametrize(("steps", "dense"), [(1, 1), (4, 1), (10, 1), (15, 2), (20, 2), (70, 7)])
def test_as_many_steps_are_dense_as_in_a_run(load_pack, make, steps, dense) -> None:
    window = load_pack("sparge.tune").SigmaWindow.of(0.1, 1.0, lambda percent: 1 - percent)
    levels = [1 - step / steps for step in range(steps)]
    assert window.dense_steps(levels) == dense
    expected = steps * 1.0 + dense * 0.5 + (steps - dense) * 0.1
    assert replace(make(), steps=steps).seconds(0.2) == pytest.approx(expected)


def test_no_way_is_taken_that_is_slower(make) -> None:
    assert make(eight_bit=0.2, sparse=0.3).seconds(0.2) == pytest.approx(40)
    assert make(sparse=0.3).seconds(0.2) == pytest.approx(20 + 20 * 0.5)
    assert make(eight_bit=0.2, sparse=0.3).verdict().startswith("Nothing to gain: 40 s as it is")


def test_where_measuring_does_not_pay_all_steps_are_dense(load_pack, make) -> None:
    speed = load_pack("sparge.speed")

    def measured(launch: float) -> Any:
        run = make()
        cost = speed.Cost(host=0.0, launch=launch, token=0.0, pair=0.0)
        return replace(run, measuring=speed.MeasuringCost(cost, run.size, run.times.dense, 1))

    # 18 sparse steps save 0.04 s a call each; a measurement takes four launches.
    assert measured(0.01).seconds(0.2) == pytest.approx(make().seconds(0.2) + 10 * 0.04)
    assert measured(1.0).seconds(0.2) == pytest.approx(20 + 20 * 0.5)


def test_bars_are_as_long_as_their_times(load_pack, make) -> None:
    bars, picture, run = load_pack("nodes.bars"), load_pack("nodes.picture"), make()
    image = bars.draw(run.verdict(), run.rows())
    assert image.shape[0] == 1 and image.shape[2:] == (picture.WIDTH, 3)
    lengths = []
    for place, colour in enumerate([picture.FAINT, *[picture.PREDICTED] * 5]):
        row = image[0, bars.TOP + bars.ROW * place + 2]  # above the letters
        lengths.append(int(((row - row.new_tensor(colour) / 255).abs().sum(-1) < 0.01).sum()))
    without, eight_bit, *sparse = lengths
    assert eight_bit == pytest.approx(without / 2, rel=0.02)
    assert sparse == [pytest.approx(without / 10, rel=0.05)] * 4
