# SPDX-License-Identifier: Apache-2.0
"""Lists that are filled up to whole steps of attend, where no head settings are given."""

from __future__ import annotations

import pytest
import torch

from sparge import AttentionStats, SparsePolicy, TokenGrid, attention, cube_order
from sparge.blocks import STEP_BLOCKS
from sparge.order.grid import TokenOrder
from tests.gpu.cases import Case, make_qkv

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("per_head", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("topk", [0.1, 0.3])
def test_an_order_alone_makes_whole_steps_and_raster_order_does_not(
    topk: float, per_head: bool, generator: torch.Generator
) -> None:
    grid = TokenGrid(9, 14, 17, prefix=40)
    q, k, v = make_qkv(Case("order", queries=grid.tokens, keys=grid.tokens), generator)
    order, heads = cube_order(grid), q.shape[1]
    policy = SparsePolicy(topk=torch.full((heads,), topk, device=q.device) if per_head else topk)

    def blocks_kept(order: TokenOrder | None) -> int:
        stats = AttentionStats(q.device)
        attention(q, k, v, policy, order=order, stats=stats)
        return stats.blocks_kept

    asked, rows = int(topk * order.key_blocks), len(order.queries_exact)
    assert blocks_kept(None) == heads * rows * asked
    dense, text = int(order.queries_exact.sum()), int(order.keys_exact.sum())
    sparse = -(-(asked + text) // STEP_BLOCKS) * STEP_BLOCKS
    assert blocks_kept(order) == heads * (dense * order.key_blocks + (rows - dense) * sparse)
