# SPDX-License-Identifier: Apache-2.0
"""The walk of a head is the one whose key blocks hold keys of like logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparge.calibrate.walk_choice import KEY_BLOCKS, choose_walks, sampled_keys
from sparge.plan import TokenGrid, TokenOrder, grid_order, raster_order
from sparge.plan.walks import Walk

GRID = TokenGrid(9, 13, 17, prefix=70, suffix=33)


def alike_in(order: TokenOrder, walk: Walk, generator: torch.Generator) -> Tensor:
    """(N, 16) keys, one value to a block of the walk but for some noise."""
    block = order.walk(walk).token_slot.long() // 64
    by_block = torch.randn(order.key_blocks, 16, generator=generator)
    return by_block[block] + 0.3 * torch.randn(order.tokens, 16, generator=generator)


def test_each_head_takes_the_walk_of_its_blocks(generator: torch.Generator) -> None:
    order = grid_order(GRID)
    walks = [Walk.RASTER, Walk.CUBES, Walk.FRAMES, Walk.CUBES]
    k = torch.stack([alike_in(order, walk, generator) for walk in walks])[None].bfloat16()
    q = torch.randn(1, 4, order.tokens, 16, generator=generator).bfloat16()
    found = choose_walks(q, k, sampled_keys(order))
    assert found.dtype == torch.int32
    assert found.tolist() == walks


def test_channels_count_as_queries_weigh_them(generator: torch.Generator) -> None:
    order = grid_order(GRID)
    k = torch.cat(
        [alike_in(order, walk, generator)[:, :8] for walk in (Walk.FRAMES, Walk.RASTER)], 1
    ).expand(1, 2, -1, -1)
    q = torch.randn(1, 2, order.tokens, 16, generator=generator)
    q[:, 0, :, 8:] *= 0.01
    q[:, 1, :, :8] *= 0.01
    assert choose_walks(q, k, sampled_keys(order)).tolist() == [Walk.FRAMES, Walk.RASTER]
    # Heads that share keys: those of the larger queries decide for both.
    shared = choose_walks(
        q * torch.tensor([1.0, 3.0])[:, None, None], k[:, :1], sampled_keys(order)
    )
    assert shared.tolist() == [Walk.RASTER] * 2


def test_batch_entries_count_as_one(generator: torch.Generator) -> None:
    order = grid_order(GRID)
    k = torch.stack([alike_in(order, walk, generator) for walk in (Walk.RASTER, Walk.CUBES)])
    q = torch.randn(2, 1, order.tokens, 16, generator=generator)
    q[0] *= 4
    assert choose_walks(q, k.unsqueeze(1), sampled_keys(order)).tolist() == [Walk.RASTER]


@pytest.mark.parametrize(
    "grid", [GRID, TokenGrid(30, 16, 16, lead_frames=4), TokenGrid(1, 40, 40, prefix=1)]
)
def test_looks_at_full_blocks_that_may_be_dropped(grid: TokenGrid) -> None:
    order = grid_order(grid)
    keys = sampled_keys(order)
    assert keys.shape[0] == order.walks
    assert 1 <= keys.shape[1] <= KEY_BLOCKS
    first = grid.prefix + grid.lead_frames * grid.frame_tokens
    assert int(keys.min()) >= first
    assert int(keys.max()) < grid.tokens - grid.suffix
    for walk, of_walk in enumerate(keys):
        blocks = order.token_slots[walk][of_walk] // 64
        assert (blocks == blocks[:, :1]).all()
        assert blocks[:, 0].unique().numel() == keys.shape[1]


def test_without_a_full_block_the_first_walk() -> None:
    order = grid_order(TokenGrid(2, 4, 5, suffix=100))
    keys = sampled_keys(order)
    assert keys.shape == (3, 0, 64)
    q = torch.randn(1, 2, order.tokens, 8)
    assert choose_walks(q, q, keys).tolist() == [0, 0]
    assert sampled_keys(raster_order(1000)).shape == (1, 15, 64)


def test_what_is_not_finite_chooses_a_walk_there_is() -> None:
    order = grid_order(GRID)
    q = torch.randn(1, 2, order.tokens, 8)
    k = q.clone()
    k[0, 1] = torch.nan
    found = choose_walks(q, k, sampled_keys(order))
    assert 0 <= int(found.min()) <= int(found.max()) < order.walks
