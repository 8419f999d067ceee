# SPDX-License-Identifier: Apache-2.0
"""Mean errors and mean densities, and what loud heads get."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparge.common.metrics import rel_l2
from sparge.head_settings import HeadSettings
from sparge.order.grid import TokenGrid, cube_order
from sparge.tune import CandidateSet, Workload, allocate
from sparge.tune.candidates import kept_ranks
from sparge.tune.error_table import ROUNDING, ErrorTable
from sparge.tune.layer_errors import CandidateAxes, LayerErrors
from tests.tune.begun import attend, begin

LARGER = TokenGrid(8, 16, 24)
LAYERS, HEADS, ORDER_KINDS, MEASURED = 12, 5, 2, 16


def test_a_target_is_met(qkv) -> None:
    measurement = begin()
    measurement.add(0, *qkv)
    exact, _ = attend(qkv, HeadSettings.uniform(3, 1.0), measurement.workload)
    reached = []
    for target in (0.05, 0.2):
        settings = measurement.error_table().choose(target=target)
        assert 0.4 * target < settings.mean_error <= target
        head_settings = settings.head_settings(0)
        assert head_settings is not None
        out, kept = attend(qkv, head_settings, measurement.workload)
        errors = torch.tensor([rel_l2(a, b) for a, b in zip(out, exact, strict=True)])
        assert float((errors * settings.head_weight[0]).mean()) < 1.3 * target
        reached.append(float(kept.float().mean()))
    assert reached[0] > reached[1]


def test_a_louder_head_gets_more(qkv) -> None:
    """Twice the values are twice the output, and the same relative errors."""
    q, k, v = (torch.cat([x[:, :1]] * 2, 1) for x in qkv)
    measurement, louder = begin(heads=2), begin(heads=2)
    measurement.add(0, q, k, v)
    louder.add(0, q, k, v * torch.tensor([1.0, 4.0])[:, None, None])
    same, other = (x.error_table() for x in (measurement, louder))
    assert same.head_weight.tolist() == pytest.approx([1, 1])
    assert other.head_weight.tolist() == pytest.approx([0.4, 1.6], rel=1e-3)
    quiet, loud = other.choose(mean_density=0.7).density[0].tolist()
    assert quiet < loud
    first, second = same.choose(mean_density=0.7).density[0].tolist()
    assert first >= second, "of equal ones the first"


def candidates_of(*pool_weights: float) -> CandidateSet:
    return CandidateSet((0.1, 0.3, 0.6, 1.0), pool_weights)


def drawn_errors(candidates: CandidateSet) -> allocate.Array:
    """(layers, heads, orders, densities, pool weights), as falling as errors are; no two equal but
    where nothing is dropped."""
    drawn = np.random.default_rng(7).random((LAYERS, HEADS, ORDER_KINDS, *candidates.shape))
    errors = (0.2 + drawn) * np.array([1.0, 0.5, 0.2, 0.0])[:, None]
    return errors.astype(np.float64)


def error_table_of(candidates: CandidateSet) -> ErrorTable:
    ones, workload = np.ones((LAYERS, HEADS)), Workload(cube_order(LARGER))
    measured, order_kinds = [MEASURED] * LAYERS, [range(ORDER_KINDS)] * LAYERS
    errors = drawn_errors(candidates)
    output_scales = drawn_output_scales(candidates)
    axes = CandidateAxes.of(workload, candidates, order_kinds)

    def part(at: slice) -> LayerErrors:
        found = errors[at], output_scales[at], ones[at]
        return LayerErrors.of(axes, *found, measured[at], order_kinds[at])

    return ErrorTable.of(axes, [part(slice(5)), part(slice(5, None))])


def drawn_output_scales(candidates: CandidateSet) -> allocate.Array:
    """Drawn output scales, 1 where nothing is dropped."""
    drawn = np.random.default_rng(8).random((LAYERS, HEADS, ORDER_KINDS, *candidates.shape))
    drawn[..., -1, :] = 0.5
    return 0.5 + drawn


def test_heads_that_keep_everything_have_no_pooled_keys() -> None:
    settings = error_table_of(candidates_of(0.0, 1.0)).choose(mean_density=1.0)
    assert settings.error.flatten().tolist() == pytest.approx([ROUNDING] * LAYERS * HEADS)
    assert not settings.pool_weight.any()


def test_settings_are_those_of_the_chosen_candidates() -> None:
    """Output scales are read between the measured densities, of the head's order and weight."""
    candidates = candidates_of(0.0, 0.5, 1.0)
    error_table, workload = error_table_of(candidates), Workload(cube_order(LARGER))
    found = error_table.choose(mean_density=0.4)
    assert set(found.pool_weight.flatten().tolist()) == {0.0, 0.5, 1.0}
    known, share = (
        workload.density(kept_ranks(densities, workload.key_blocks))
        for densities in (candidates.densities, error_table.axes.densities)
    )
    scales = drawn_output_scales(candidates)
    for layer, head in np.ndindex(LAYERS, HEADS):
        place = np.searchsorted(
            error_table.axes.densities, float(found.density[layer, head]) - 1e-5
        )
        pool_weight = candidates.pool_weights.index(float(found.pool_weight[layer, head]))
        of_head = scales[layer, head, found.order_kind[layer, head], :, pool_weight]
        expected = np.interp(share[place], known, of_head)
        assert float(found.output_scale[layer, head]) == pytest.approx(expected, rel=1e-5)


def test_a_target_is_the_mean_density_that_is_expected_to_meet_it() -> None:
    error_table = error_table_of(candidates_of(0.0, 0.5, 1.0))
    met = error_table.choose(target=0.3)
    for mean in torch.linspace(0.1, 1, 400).tolist():
        shared = error_table.choose(mean_density=mean)
        if shared.mean_error <= 0.3:
            break
    torch.testing.assert_close(met.density.mean(), shared.density.mean(), rtol=0.03, atol=0)
