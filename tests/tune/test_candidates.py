# SPDX-License-Identifier: Apache-2.0
"""A candidate's buckets and cost are what attention makes of its budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparge.head_settings import HeadSettings
from sparge.order.grid import TokenGrid, cube_order
from sparge.reference.choose import Choice, choose_blocks
from sparge.reference.packed import Packed, pack_qkv
from sparge.tune import CandidateSet, Workload

CASES = [
    Workload(cube_order(TokenGrid(5, 9, 13, prefix=70, suffix=33))),
    Workload(cube_order(TokenGrid(7, 6, 13, lead_frames=1))),
    Workload.of_tokens(1000),
    Workload(cube_order(TokenGrid(5, 9, 13)), sink=True),
    Workload.of_tokens(1000, is_causal=True),
    Workload.of_tokens(1000, is_causal=True, sink=True),
]
NAMES = ["text", "lead", "raster", "first block", "causal", "causal sink"]
ROUNDING = 1e-9
CANDIDATES = CandidateSet(densities=(0.1, 0.3, 0.7, 1.0), floor=2)


def choose(packed: Packed, workload: Workload, density: float) -> Choice:
    ones = torch.ones(2)
    head_settings = HeadSettings(
        ones * density, ones, torch.tensor([0, 1], dtype=torch.int32), floor=2
    )
    policy = workload.policy()
    return choose_blocks(packed, policy, head_settings, scale=0.25, is_causal=workload.is_causal)


@pytest.mark.parametrize("workload", CASES, ids=NAMES)
def test_buckets_and_cost_are_those_of_attention(make_qkv, workload: Workload) -> None:
    q, k, v = make_qkv(1, 2, workload.order.tokens, 16)
    packed = pack_qkv(q, k, v, None if workload.is_causal else workload.order)
    choices = [choose(packed, workload, density) for density in CANDIDATES.densities]
    buckets = CANDIDATES.buckets(choices[0].rank, choices[0].valid)
    costs = workload.density(CANDIDATES.kept_ranks(workload.key_blocks))
    sparse = workload.sparse_query_blocks()
    assert len(sparse) == int((~workload.order.queries_exact).sum()) > 0
    for place, choice in enumerate(choices):
        kept = (buckets >= 0) & (buckets <= place)
        assert torch.equal(kept[:, :, sparse], choice.kept[:, :, sparse])
        share = int(choice.kept_pairs().sum()) / int(choice.valid_pairs().sum())
        assert costs[place] == pytest.approx(share, abs=ROUNDING + ragged_share(choice))
    assert costs[0] < costs[-1] == 1


def ragged_share(choice: Choice) -> float:
    """The most that counting ranked blocks by their mean may be off: what the ragged ones lack."""
    ranked = choice.pairs * (choice.rank >= 0)
    largest = ranked.amax(-1, keepdim=True)
    lacking = (largest - ranked) * (choice.rank >= 0)
    return int(lacking.sum()) / int(choice.valid_pairs().sum())


def test_sparse_causal_costs_are_exact(make_qkv) -> None:
    """Only the diagonal is ragged there, and it is always kept: nothing to allow for."""
    q, k, v = make_qkv(1, 2, 1000, 16)
    for workload in CASES[-2:]:
        choice = choose(pack_qkv(q, k, v), workload, 0.1)
        assert ragged_share(choice) == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"densities": (0.5, 0.3, 1.0)}, "densities are .* ascend from above 0 to 1"),
        ({"densities": (0.5, 0.9)}, "ascend from above 0 to 1"),
        ({"densities": (0.0, 1.0)}, "ascend from above 0 to 1"),
        ({"densities": (1.0,)}, "nothing but 1"),
        ({"pool_weights": (0.5, 1.0)}, "pool_weights are .* from 0"),
        ({"pool_weights": ()}, "pool_weights are"),
        ({"output_scales": (0.0, 2.0)}, "output_scales are .* the least and the most"),
        ({"output_scales": (2.0, 0.5)}, "output_scales are"),
        ({"output_scales": (0.5, float("inf"))}, "output_scales are"),
        ({"floor": 0}, "floor is 0"),
    ],
)
def test_other_sets_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CandidateSet(**change)
