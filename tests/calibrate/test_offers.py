# SPDX-License-Identifier: Apache-2.0
"""Mean errors and mean densities, in steps of either kind, and what loud heads get."""

from __future__ import annotations

import pytest
import torch

from sparge.metrics import rel_l2
from sparge.plan import HeadBudget
from tests.calibrate.begun import attend, begin


def test_a_target_is_met(qkv) -> None:
    calibration = begin()
    calibration.sample(0, *qkv)
    exact, _ = attend(qkv, HeadBudget.uniform(3, 1.0), calibration.workload)
    reached = []
    for target in (0.05, 0.2):
        choices = calibration.offers().freeze(target=target)
        assert 0.5 * target < choices.mean_error <= target
        budget = choices.budget(0)
        assert budget is not None
        out, kept = attend(qkv, budget, calibration.workload)
        errors = torch.tensor([rel_l2(a, b) for a, b in zip(out, exact, strict=True)])
        assert float((errors * choices.loudness[0]).mean()) < 1.3 * target
        reached.append(float(kept.float().mean()))
    assert reached[0] > reached[1]


def test_a_target_is_the_mean_density_that_is_expected_to_meet_it(qkv) -> None:
    calibration = begin(layers=2)
    calibration.sample(0, *qkv)
    calibration.sample(1, *qkv)
    offers = calibration.offers()
    for dropping in (False, True):
        met = offers.freeze(target=0.1, dropping=dropping)
        for mean in torch.linspace(0.3, 1, 200).tolist():
            shared = offers.freeze(mean_density=mean, dropping=dropping)
            if shared.mean_error <= 0.1:
                break
        torch.testing.assert_close(met.density.mean(), shared.density.mean(), rtol=0.1, atol=0)


def test_without_the_residual_the_mean_density_is_the_same(qkv) -> None:
    calibration = begin()
    calibration.sample(0, *qkv)
    offers = calibration.offers()
    alternating, steps = offers.freeze_steps(0.4, 8)
    assert alternating.pooling.gain.any() and not alternating.dropping.gain.any()
    assert alternating.dropping.mean_error > alternating.pooling.mean_error
    for both in steps:
        assert both.pooling.gain.any() and not both.dropping.gain.any()
    assert offers.freeze_steps(0.6, 8)[1] == [], "alike, but for their kinds"
    for choices in (alternating.pooling, alternating.dropping):
        assert float(choices.density.mean()) <= 0.4


def test_a_louder_head_gets_more(qkv) -> None:
    """Twice the values are twice the output, and the same relative errors."""
    q, k, v = (torch.cat([x[:, :1]] * 2, 1) for x in qkv)
    calibration, louder = begin(heads=2), begin(heads=2)
    calibration.sample(0, q, k, v)
    louder.sample(0, q, k, v * torch.tensor([1.0, 4.0])[:, None, None])
    same, other = (x.offers() for x in (calibration, louder))
    assert same.loudness.tolist() == pytest.approx([1, 1])
    assert other.loudness.tolist() == pytest.approx([0.4, 1.6], rel=1e-3)
    quiet, loud = other.freeze(mean_density=0.7).density[0].tolist()
    assert quiet < loud
    first, second = same.freeze(mean_density=0.7).density[0].tolist()
    assert first >= second, "of equal ones the first"


def test_the_steps_that_are_left_keep_their_means(qkv) -> None:
    calibration = begin()
    calibration.sample(0, *qkv)
    offers, drift = calibration.offers(), torch.ones(1, 3, 1, dtype=torch.float64)
    _, steps = offers.freeze_steps(0.4, 8)
    _, left = offers.freeze_steps(0.4, 8, wanted=range(5, 9), drift=drift)
    _, some = offers.freeze_steps(0.4, 8, wanted=range(2, 4), drift=drift)
    assert len(steps) == 8
    for one, same in zip(steps[5:] + steps[2:4], left + some, strict=True):
        assert torch.equal(one.pooling.density, same.pooling.density)
        assert torch.equal(one.dropping.density, same.dropping.density)
