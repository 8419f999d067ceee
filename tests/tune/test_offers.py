# SPDX-License-Identifier: Apache-2.0
"""Mean errors and mean densities, and what loud heads get."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparge.common.metrics import rel_l2
from sparge.head_settings import HeadBudget, Router
from sparge.order.grid import TokenGrid, cube_order
from sparge.tune import CandidateSet, Workload, budgets, curves
from sparge.tune.offers import Offers
from sparge.tune.workload import RESIDUAL_COST
from tests.tune.begun import attend, begin

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
    met = offers.freeze(target=0.1)
    for mean in torch.linspace(0.3, 1, 200).tolist():
        shared = offers.freeze(mean_density=mean)
        if shared.mean_error <= 0.1:
            break
    torch.testing.assert_close(met.density.mean(), shared.density.mean(), rtol=0.1, atol=0)


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


def of_all_gains(offers: Offers, mean: float) -> list[torch.Tensor]:
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
    gains = np.array(candidates.gains)
    costs = shares[:, None] + RESIDUAL_COST * ((gains > 0) & (shares[:, None] < 1))
    shape = errors.shape[2:]
    costs, of_pairs, densities, gains = (
        np.broadcast_to(x, errors.shape[2:]).ravel()
        for x in (costs, shares[:, None], np.array(offers.densities)[:, None], gains)
    )
    errors = errors.reshape(LAYERS * HEADS, -1)
    chosen = budgets.HullSteps.of(errors, costs, of_pairs).climb(mean)
    tables = [x[chosen] for x in (densities, gains)]
    places = np.unravel_index(chosen, shape)
    contrasts = drawn_contrasts(candidates).reshape(LAYERS * HEADS, *shape[:2], -1, shape[-1])
    known = kept(candidates.densities)
    taken = [
        np.interp(shares[density], known, of_head[walk, router, :, gain])
        for of_head, walk, router, density, gain in zip(contrasts, *places, strict=True)
    ]
    tables.append(np.array(taken))
    return [torch.from_numpy(x).float().view(LAYERS, HEADS) for x in tables]


@pytest.mark.parametrize("gains", [(0.0,), (0.0, 0.5, 1.0)])
def test_heads_get_what_they_would_of_all_gains(gains) -> None:
    """Though budgets see the best ones alone."""
    offers = offers_of(candidates_of(*gains))
    for mean in (0.15, 0.4, 0.8):
        found = offers.freeze(mean_density=mean)
        expected = of_all_gains(offers, mean)
        tables = (found.density, found.gain, found.contrast)
        for table, own in zip(expected, tables, strict=True):
            torch.testing.assert_close(table, own, rtol=1e-6, atol=0)
        assert bool(found.gain.any()) == (len(gains) > 1)


def test_heads_that_keep_everything_have_no_residual() -> None:
    choices = offers_of(candidates_of(0.0, 1.0)).freeze(mean_density=1.0)
    assert choices.error.flatten().tolist() == pytest.approx([0.01] * LAYERS * HEADS)
    assert not choices.gain.any()
