# SPDX-License-Identifier: Apache-2.0
"""Token orders of sequences whose tokens an engine has put elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparge
from sparge.order.grid import TokenGrid, dealt_places, grid_order

GRID = TokenGrid(1, 16, 20, prefix=26)


def test_parts_are_dealt_one_after_another_to_each_rank() -> None:
    assert dealt_places((2, 6), 2).tolist() == [0, 2, 3, 4, 1, 5, 6, 7]
    assert dealt_places((3, 4), 2).tolist() == [0, 1, 3, 4, 2, 5, 6], "the first rank has one more"
    assert dealt_places((7,), 3).tolist() == list(range(7))


@pytest.mark.parametrize("topk", [1.0, 0.3])
def test_tokens_elsewhere_share_their_blocks_and_give_the_same(make_qkv, topk: float) -> None:
    q, k, v = make_qkv(1, 2, GRID.tokens)
    order, places = grid_order(GRID), dealt_places((GRID.prefix, 320), 2)
    policy = sparge.SparsePolicy(topk=topk)
    settings = sparge.HeadSettings(
        torch.tensor([0.3, 0.6]),
        torch.tensor([0.5, 0.0]),
        torch.tensor([1, 0], dtype=torch.int32),
        order_kind=torch.tensor([1, 0], dtype=torch.int32),
    )
    there = [x[:, :, places].contiguous() for x in (q, k, v)]
    for head_settings in (None, settings):
        options: dict[str, Any] = {"head_settings": head_settings}
        own = sparge.attention(q, k, v, policy, order=order, **options)[:, :, places]
        out, untaken = (
            sparge.attention(there[0], there[1], there[2], policy, order=each, **options)
            for each in (order.taken_from(places), order)
        )
        torch.testing.assert_close(out, own, rtol=0, atol=4e-3)
        if head_settings or topk < 1:
            assert (untaken - own).abs().max() > 0.05, "another selection"
