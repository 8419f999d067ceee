# SPDX-License-Identifier: Apache-2.0
"""Mean errors and mean densities, and what loud heads get."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparge.common.metrics import rel_l2
from sparge.head_settings import HeadSettings, Router
from sparge.order.grid import TokenGrid, cube_order
from sparge.tune import CandidateSet, Workload, allocate, curves
from sparge.tune.offers import Offers
from sparge.tune.workload import POOLED_COST
from tests.tune.begun import attend, begin

LARGER = TokenGrid(8, 16, 24)
LAYERS, HEADS, ORDER_KINDS, SAMPLES = 2, 5, 2, 16


def test_a_target_is_met(qkv) -> None:
    measurement = begin()
    measurement.sample(0, *qkv)
    exact, _ = attend(qkv, HeadSettings.uniform(3, 1.0), measurement.workload)
    reached = []
    for target in (0.05, 0.2):
        choices = measurement.offers().freeze(target=target)
        assert 0.4 * target < choices.mean_error <= target
        head_settings = choices.head_settings(0)
        assert head_settings is not None
        out, kept = attend(qkv, head_settings, measurement.workload)
        errors = torch.tensor([rel_l2(a, b) for a, b in zip(out, exact, strict=True)])
        assert float((errors * choices.head_weight[0]).mean()) < 1.3 * target
        reached.append(float(kept.float().mean()))
    assert reached[0] > reached[1]


def test_a_target_is_the_mean_density_that_is_expected_to_meet_it(qkv) -> None:
    measurement = begin(layers=2)
    measurement.sample(0, *qkv)
    measurement.sample(1, *qkv)
    offers = measurement.offers()
    met = offers.freeze(target=0.1)
    for mean in torch.linspace(0.3, 1, 200).tolist():
        shared = offers.freeze(mean_density=mean)
        if shared.mean_error <= 0.1:
            break
    torch.testing.assert_close(met.density.mean(), shared.density.mean(), rtol=0.1, atol=0)


def test_a_louder_head_gets_more(qkv) -> None:
    """Twice the values are twice the output, and the same relative errors."""
    q, k, v = (torch.cat([x[:, :1]] * 2, 1) for x in qkv)
    measurement, louder = begin(heads=2), begin(heads=2)
    measurement.sample(0, q, k, v)
    louder.sample(0, q, k, v * torch.tensor([1.0, 4.0])[:, None, None])
    same, other = (x.offers() for x in (measurement, louder))
    assert same.head_weight.tolist() == pytest.approx([1, 1])
    assert other.head_weight.tolist() == pytest.approx([0.4, 1.6], rel=1e-3)
    quiet, loud = other.freeze(mean_density=0.7).density[0].tolist()
    assert quiet < loud
    first, second = same.freeze(mean_density=0.7).density[0].tolist()
    assert first >= second, "of equal ones the first"


def candidates_of(*pool_weights: float) -> CandidateSet:
    return CandidateSet((0.1, 0.3, 0.6, 1.0), pool_weights, routers=(Router.ERROR, Router.MASS))


def drawn_errors(candidates: CandidateSet) -> allocate.Array:
    """(layers, heads, walks, routers, densities, gains), as falling as errors are; no two equal but
    where nothing is dropped."""
    drawn = np.random.default_rng(7).random((LAYERS, HEADS, ORDER_KINDS, *candidates.shape))
    errors = (0.2 + drawn) * np.array([1.0, 0.5, 0.2, 0.0])[:, None]
    return errors.astype(np.float64)


def offers_of(candidates: CandidateSet) -> Offers:
    ones, workload = np.ones((LAYERS, HEADS)), Workload(cube_order(LARGER))
    samples, order_kinds = [SAMPLES] * LAYERS, [range(ORDER_KINDS)] * LAYERS
    errors = drawn_errors(candidates)
    output_scales = drawn_output_scales(candidates)
    return Offers.of(
        workload, candidates, errors, output_scales, 0.01 * ones, ones, samples, order_kinds
    )


def drawn_output_scales(candidates: CandidateSet) -> allocate.Array:
    """Drawn output scales, 1 where nothing is dropped."""
    drawn = np.random.default_rng(8).random((LAYERS, HEADS, ORDER_KINDS, *candidates.shape))
    drawn[..., -1, :] = 0.5
    return 0.5 + drawn


def of_all_pool_weights(offers: Offers, mean: float) -> list[torch.Tensor]:
    """Densities, gains and contrasts that budgets share where each gain is a candidate."""
    candidates, workload = offers.candidates, Workload(cube_order(LARGER))

    def kept(densities: tuple[float, ...]) -> allocate.Array:
        return workload.density(CandidateSet(densities).kept_ranks(workload.key_blocks))

    shares = kept(tuple(offers.densities))
    errors = curves.steady(drawn_errors(candidates), np.full(LAYERS, SAMPLES))
    of_pool_weights = np.moveaxis(errors, -1, 0)
    logs = [curves.logs_between(x, kept(candidates.densities), shares) for x in of_pool_weights]
    errors = np.exp(np.stack(logs, -1))
    errors[..., shares >= 1, :] = 0
    pool_weights = np.array(candidates.pool_weights)
    costs = shares[:, None] + POOLED_COST * ((pool_weights > 0) & (shares[:, None] < 1))
    shape = errors.shape[2:]
    costs, of_pairs, densities, pool_weights = (
        np.broadcast_to(x, errors.shape[2:]).ravel()
        for x in (costs, shares[:, None], np.array(offers.densities)[:, None], pool_weights)
    )
    errors = errors.reshape(LAYERS * HEADS, -1)
    chosen = allocate.HullSteps.of(errors, costs, of_pairs).climb(mean)
    tables = [x[chosen] for x in (densities, pool_weights)]
    places = np.unravel_index(chosen, shape)
    output_scales = drawn_output_scales(candidates).reshape(
        LAYERS * HEADS, *shape[:2], -1, shape[-1]
    )
    known = kept(candidates.densities)
    taken = [
        np.interp(shares[density], known, of_head[order_kind, router, :, pool_weight])
        for of_head, order_kind, router, density, pool_weight in zip(
            output_scales, *places, strict=True
        )
    ]
    tables.append(np.array(taken))
    return [torch.from_numpy(x).float().view(LAYERS, HEADS) for x in tables]


@pytest.mark.parametrize("pool_weights", [(0.0,), (0.0, 0.5, 1.0)])
def test_heads_get_what_they_would_of_all_pool_weights(pool_weights) -> None:
    """Though budgets see the best ones alone."""
    offers = offers_of(candidates_of(*pool_weights))
    for mean in (0.15, 0.4, 0.8):
        found = offers.freeze(mean_density=mean)
        expected = of_all_pool_weights(offers, mean)
        tables = (found.density, found.pool_weight, found.output_scale)
        for table, own in zip(expected, tables, strict=True):
            torch.testing.assert_close(table, own, rtol=1e-6, atol=0)
        assert bool(found.pool_weight.any()) == (len(pool_weights) > 1)


def test_heads_that_keep_everything_have_no_residual() -> None:
    choices = offers_of(candidates_of(0.0, 1.0)).freeze(mean_density=1.0)
    assert choices.error.flatten().tolist() == pytest.approx([0.01] * LAYERS * HEADS)
    assert not choices.pool_weight.any()
