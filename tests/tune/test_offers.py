# SPDX-License-Identifier: Apache-2.0
"""Mean errors and mean densities, in steps of either kind, and what loud heads get."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparge.common.metrics import rel_l2
from sparge.head_settings import HeadBudget, Router
from sparge.order.grid import TokenGrid, cube_order
from sparge.tune import CandidateSet, Workload, budgets, curves
from sparge.tune.offers import Offers
from sparge.tune.workload import RESIDUAL_COST
from tests.tune.begun import CANDIDATES, attend, begin

LARGER = TokenGrid(8, 16, 24)
LAYERS, HEADS, WALKS, SAMPLES = 2, 5, 2, 16


def test_a_target_is_met(qkv) -> None:
    calibration = begin()
    calibration.sample(0, *qkv)
    exact, _ = attend(qkv, HeadBudget.uniform(3, 1.0), calibration.workload)
    reached = []
    for target in (0.05, 0.2):
        choices = calibration.offers().freeze(target=target)
        assert 0.4 * target < choices.mean_error <= target
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


@pytest.mark.parametrize("bare_candidates", [True, False])
def test_without_the_residual_the_mean_density_is_the_same(qkv, bare_candidates: bool) -> None:
    bare = replace(CANDIDATES, contrasts=(1.0, 1.0))
    calibration = begin(candidates=bare if bare_candidates else CANDIDATES)
    calibration.sample(0, *qkv)
    offers = calibration.offers()
    alternating, steps = offers.freeze_steps(0.4, 8)
    assert alternating.pooling.gain.any()
    assert not alternating.dropping.gain.any()
    pooling, dropping = alternating.pooling.mean_error, alternating.dropping.mean_error
    assert dropping > pooling or not bare_candidates
    assert dropping >= pooling, "its candidates are some of the others"
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


def candidates_of(*gains: float) -> CandidateSet:
    return CandidateSet((0.1, 0.3, 0.6, 1.0), gains, routers=(Router.ERROR, Router.MASS))


def drawn_errors(candidates: CandidateSet) -> budgets.Array:
    """(layers, heads, walks, routers, densities, gains), as falling as errors are; no two equal but
    where nothing is dropped."""
    drawn = np.random.default_rng(7).random((LAYERS, HEADS, WALKS, *candidates.shape))
    errors = (0.2 + drawn) * np.array([1.0, 0.5, 0.2, 0.0])[:, None]
    return errors.astype(np.float64)


def offers_of(candidates: CandidateSet) -> Offers:
    ones, workload = np.ones((LAYERS, HEADS)), Workload(cube_order(LARGER))
    samples, walks = [SAMPLES] * LAYERS, [range(WALKS)] * LAYERS
    errors = drawn_errors(candidates)
    contrasts = drawn_contrasts(candidates)
    return Offers.of(workload, candidates, errors, contrasts, 0.01 * ones, ones, samples, walks)


def drawn_contrasts(candidates: CandidateSet) -> budgets.Array:
    """Drawn output scales, 1 where nothing is dropped."""
    drawn = np.random.default_rng(8).random((LAYERS, HEADS, WALKS, *candidates.shape))
    drawn[..., -1, :] = 0.5
    return 0.5 + drawn


def of_all_gains(
    offers: Offers, mean: float, drift: torch.Tensor, dropping: bool
) -> list[torch.Tensor]:
    """Densities, gains and contrasts that budgets share where each gain is a candidate."""
    candidates, workload = offers.candidates, Workload(cube_order(LARGER))

    def kept(densities: tuple[float, ...]) -> budgets.Array:
        return workload.density(CandidateSet(densities).kept_ranks(workload.key_blocks))

    shares = kept(tuple(offers.densities))
    errors = curves.steady(drawn_errors(candidates), np.full(LAYERS, SAMPLES))
    of_gains = np.moveaxis(errors, -1, 0)
    logs = [curves.logs_between(x, kept(candidates.densities), shares) for x in of_gains]
    errors = np.exp(np.stack(logs, -1))
    errors[..., shares >= 1, :] = 0
    errors *= drift.numpy()[..., None, None, None]
    gains = np.array(candidates.gains)
    costs = shares[:, None] + RESIDUAL_COST * ((gains > 0) & (shares[:, None] < 1))
    shape = errors.shape[2:]
    costs, of_pairs, densities, gains = (
        np.broadcast_to(x, errors.shape[2:]).ravel()
        for x in (costs, shares[:, None], np.array(offers.densities)[:, None], gains)
    )
    allowed = np.flatnonzero(gains == 0) if dropping else np.arange(len(gains))
    errors = errors.reshape(LAYERS * HEADS, -1)[:, allowed]
    chosen = budgets.HullSteps.of(errors, costs[allowed], of_pairs[allowed]).climb(mean)
    tables = [x[allowed[chosen]] for x in (densities, gains)]
    places = np.unravel_index(allowed[chosen], shape)
    contrasts = drawn_contrasts(candidates).reshape(LAYERS * HEADS, *shape[:2], -1, shape[-1])
    known = kept(candidates.densities)
    taken = [
        np.interp(shares[density], known, of_head[walk, router, :, gain])
        for of_head, walk, router, density, gain in zip(contrasts, *places, strict=True)
    ]
    tables.append(np.array(taken))
    return [torch.from_numpy(x).float().view(LAYERS, HEADS) for x in tables]


@pytest.mark.parametrize("gains", [(0.0,), (0.0, 0.5, 1.0)])
@pytest.mark.parametrize("dropping", [False, True])
def test_heads_get_what_they_would_of_all_gains(gains, dropping) -> None:
    """Though budgets see the best ones alone."""
    offers = offers_of(candidates_of(*gains))
    drift = 1 + torch.rand(LAYERS, HEADS, WALKS, generator=torch.Generator().manual_seed(3))
    for mean in (0.15, 0.4, 0.8):
        found = offers.freeze(mean_density=mean, drift=drift.double(), dropping=dropping)
        expected = of_all_gains(offers, mean, drift.double(), dropping)
        tables = (found.density, found.gain, found.contrast)
        for table, own in zip(expected, tables, strict=True):
            torch.testing.assert_close(table, own, rtol=1e-6, atol=0)
        assert bool(found.gain.any()) == (len(gains) > 1 and not dropping)


def test_every_second_step_is_without_the_residual() -> None:
    offers = offers_of(candidates_of(0.0, 0.5, 1.0))
    for choices in (
        offers.freeze_steps(0.3, 4)[0].dropping,
        offers.freeze(target=0.2, dropping=True),
    ):
        assert not choices.gain.any()


def test_heads_that_keep_everything_have_no_residual() -> None:
    choices = offers_of(candidates_of(0.0, 1.0)).freeze(mean_density=1.0)
    assert choices.error.flatten().tolist() == pytest.approx([0.01] * LAYERS * HEADS)
    assert not choices.gain.any()
