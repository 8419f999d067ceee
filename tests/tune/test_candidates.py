# SPDX-License-Identifier: Apache-2.0
"""A candidate's buckets and cost are what attention makes of its budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparge.head_settings import HeadSettings
from sparge.order.grid import TokenGrid, cube_order, raster_order
from sparge.policy import SparsePolicy
from sparge.reference import Quantized, Route, quantize_qkv, route
from sparge.tune import CandidateSet, Workload
from sparge.tune.candidates import kept_ranks

CASES = [
    Workload(cube_order(TokenGrid(5, 9, 13, prefix=70, suffix=33))),
    Workload(cube_order(TokenGrid(7, 6, 13, lead_frames=1))),
    Workload(raster_order(1000)),
]
NAMES = ["text", "lead", "raster"]
ROUNDING = 1e-9
CANDIDATES = CandidateSet(densities=(0.1, 0.3, 0.7, 1.0))


def choose(x: Quantized, density: float) -> Route:
    ones = torch.ones(2)
    head_settings = HeadSettings(ones * density, ones, torch.tensor([0, 1], dtype=torch.int32))
    return route(x, SparsePolicy(), head_settings, scale=0.25)


@pytest.mark.parametrize("workload", CASES, ids=NAMES)
def test_buckets_and_cost_are_those_of_attention(make_qkv, workload: Workload) -> None:
    q, k, v = make_qkv(1, 2, workload.order.tokens, 16)
    x = quantize_qkv(q, k, v, workload.order)
    routes = [choose(x, density) for density in CANDIDATES.densities]
    buckets = CANDIDATES.buckets(routes[0].rank, routes[0].valid)
    costs = workload.density(kept_ranks(CANDIDATES.densities, workload.key_blocks))
    sparse = workload.sparse_query_blocks()
    assert len(sparse) == int((~workload.order.queries_exact).sum()) > 0
    for place, routed in enumerate(routes):
        kept = (buckets >= 0) & (buckets <= place)
        assert torch.equal(kept[:, :, sparse], routed.kept[:, :, sparse])
        assert costs[place] == pytest.approx(routed.density(), abs=ROUNDING + ragged_share(routed))
    assert costs[0] < costs[-1] == 1


def ragged_share(routed: Route) -> float:
    """The most that counting ranked blocks by their mean may be off: what the ragged ones lack."""
    ranked = routed.pairs * (routed.rank >= 0)
    largest = ranked.amax(-1, keepdim=True)
    lacking = (largest - ranked) * (routed.rank >= 0)
    return int(lacking.sum()) / int(routed.valid_pairs().sum())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"densities": (0.5, 0.3, 1.0)}, "densities are .* ascend from above 0 to 1"),
        ({"densities": (0.5, 0.9)}, "ascend from above 0 to 1"),
        ({"densities": (0.0, 1.0)}, "ascend from above 0 to 1"),
        ({"densities": (1.0,)}, "nothing but 1"),
        ({"pool_weights": (0.5, 1.0)}, "pool_weights are .* from 0"),
        ({"pool_weights": ()}, "pool_weights are"),
    ],
)
def test_other_sets_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CandidateSet(**change)
