# SPDX-License-Identifier: Apache-2.0
"""Packed token orders: which slot holds which token, and which blocks are exact."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparge.blocks import block_count
from sparge.order import grid as grid_module
from sparge.order.grid import (
    TokenGrid,
    TokenOrder,
    dealt_places,
    grid_order,
    order_as_dealt,
    raster_order,
    unmeasured_order,
)
from sparge.order.variants import VARIANTS, OrderKind, order_ranks, unmeasured_kind
from tests.test_surroundings import SURROUNDINGS

GRIDS = [
    TokenGrid(28, 30, 53, suffix=200), TokenGrid(13, 30, 45, prefix=226),
    TokenGrid(21, 30, 52, prefix=30, suffix=1560), TokenGrid(13, 30, 45, prefix=65, lead_frames=1),
    TokenGrid(1, 45, 64, prefix=512, suffix=33), TokenGrid(1, 1, 1), TokenGrid(5, 7, 3, suffix=64),
    TokenGrid(3, 1, 1, 1, 1, lead_frames=3), TokenGrid(3, 5, 6, tail=130),
    TokenGrid(5, 6, 7, prefix=70, suffix=9, lead_frames=1, tail=93),
]  # fmt: skip


def check(order: TokenOrder, tokens: int) -> None:
    """Everything that holds for any order."""
    slots, inverse = order.slot_token, order.token_slots[0]
    assert slots.dtype == inverse.dtype == order.block_counts.dtype == torch.int32
    assert (order.tokens, order.slots) == (tokens, 64 * order.key_blocks)
    assert torch.equal(slots[inverse.long()], torch.arange(tokens, dtype=torch.int32))
    assert int((slots == -1).sum()) == order.slots - tokens
    blocks = slots.view(-1, 64)
    assert torch.equal((blocks != -1).sum(-1), order.block_counts)
    first_empty = (torch.arange(64) >= order.block_counts.unsqueeze(-1)).flatten()
    assert torch.equal(slots == -1, first_empty), "empty slots come last in their block"
    assert order.query_counts().sum() == tokens
    assert order.query_counts().shape == (order.query_blocks,) == order.queries_exact.shape


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_segments_are_packed_one_after_another_and_orders_share_them(grid: TokenGrid) -> None:
    order = first = grid_order(grid)
    check(order, grid.tokens)
    frame = grid.height * grid.width
    lead, rest = grid.lead_frames * frame, (grid.frames - grid.lead_frames) * frame
    sizes = [size for size in (grid.prefix, lead, rest, grid.tail, grid.suffix) if size]
    assert [segment.tokens for segment in order.segments] == sizes
    assert order.key_blocks == sum(block_count(size, 64) for size in sizes), "no padding inside"
    block = token = 0
    for segment in order.segments:
        assert (segment.first_block, segment.first_token) == (block, token)
        held = order.slot_token[64 * block : 64 * (block + segment.key_blocks)]
        inside = torch.arange(token, token + segment.tokens, dtype=torch.int32)
        assert torch.equal(held[: segment.tokens].sort().values, inside)
        assert (held[segment.tokens :] == -1).all()
        block, token = block + segment.key_blocks, token + segment.tokens

    # Text is exact both ways, and a lead frame as keys.
    token = torch.arange(grid.tokens)
    text = (token < grid.prefix) | (token >= grid.tokens - grid.suffix)
    lead = (token >= grid.prefix) & (token < grid.prefix + grid.lead_frames * grid.frame_tokens)
    of_keys = torch.zeros(order.key_blocks, dtype=torch.bool)
    of_keys[order.token_slots[0][text | lead].long() // 64] = True
    of_queries = torch.zeros(order.query_blocks, dtype=torch.bool)
    of_queries[order.token_slots[0][text].long() // 128] = True
    assert torch.equal(order.keys_exact, of_keys)
    assert torch.equal(order.queries_exact, of_queries)
    for variant in range(VARIANTS):
        order = grid_order(grid, variant)
        assert order.order_kinds == len(OrderKind) and order.segments == first.segments
        for index in range(len(OrderKind)):
            of_kind = order.of_kind(index)
            check(of_kind, grid.tokens)
            assert of_kind.order_kinds == 1
            assert of_kind.slot_tokens.data_ptr() == order.slot_tokens[index].data_ptr(), "a view"
            assert torch.equal(of_kind.block_counts, first.block_counts)
            assert torch.equal(of_kind.token_slots[0][text], first.token_slots[0][text])
        of_kind = order.of_kind(unmeasured_kind(variant))
        assert torch.equal(unmeasured_order(grid, variant).slot_token, of_kind.slot_token)


@pytest.mark.parametrize("variant", range(VARIANTS))
def test_text_and_a_tail_keep_their_order_and_the_grid_gets_that_of_the_order(variant: int) -> None:
    order = grid_order(TokenGrid(5, 6, 7, prefix=70, tail=93, suffix=9), variant)
    _, _, tail, _ = order.segments
    assert (tail.tokens, tail.keys_exact, tail.queries_exact) == (93, False, False)
    first = 64 * tail.first_block
    for order_kind, slots in enumerate(order.slot_tokens):
        assert slots[:70].tolist() == list(range(70))
        assert slots[first : first + 93].tolist() == list(range(280, 373))
        assert slots[-64:-55].tolist() == list(range(373, 382))
        ranks = order_ranks(OrderKind(order_kind), 5, 6, 7, variant).flatten().tolist()
        assert (order.token_slots[order_kind, 70:280] - 128).tolist() == ranks


def test_key_lengths_cut_the_suffix() -> None:
    grid = TokenGrid(3, 5, 6, prefix=2, suffix=130)
    order = grid_order(grid)
    lengths = torch.tensor([222, 92, 157], dtype=torch.int32)
    counts = order.key_counts(lengths, 3)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [[2, 64, 26, 64, 64, 2], [2, 64, 26, 0, 0, 0], [2, 64, 26, 64, 1, 0]]
    whole = order.block_counts.expand(2, -1)
    assert torch.equal(order.key_counts(None, 2), whole)


def test_orders_are_made_once_and_copied_once() -> None:
    grid = TokenGrid(4, 5, 6, prefix=7)
    order = grid_order(grid)
    assert grid_order(replace(grid)) is order
    assert order.on("cpu") is order
    copy = order.on("meta")
    assert copy is order.on(torch.device("meta"))
    assert copy.slot_token.device.type == copy.queries_exact.device.type == "meta"
    assert copy.segments == order.segments
    other = replace(order, segments=order.segments[:1])
    assert other.on("meta") is not copy and other.on("meta").segments == other.segments


DEFAULTS = {
    name: SURROUNDINGS[name]
    for name in ("device context", "default device", "default fp64", "default bf16")
} | {"fake": FakeTensorMode, "inference": torch.inference_mode}


@pytest.mark.parametrize("context", DEFAULTS.values(), ids=DEFAULTS.keys())
def test_orders_are_the_same_whatever_is_the_default(context) -> None:
    """They are kept for whoever asks next."""
    grid = TokenGrid(3, 7, 9, prefix=5, suffix=70, lead_frames=1)
    makers = (
        lambda: grid_order(grid, 1),
        lambda: unmeasured_order(grid, 1),
        lambda: raster_order(331),
    )

    def made() -> list[TokenOrder]:
        grid_module._order_of_kinds.cache_clear()
        raster_order.cache_clear()
        return [make() for make in makers]

    expected = made()
    with context():
        found = made()
    for order, right in zip(found, expected, strict=True):
        assert order.segments == right.segments
        for name in ("slot_tokens", "token_slots", "block_counts", "keys_exact", "queries_exact"):
            tensor, wanted = getattr(order, name), getattr(right, name)
            assert type(tensor) is torch.Tensor and tensor.device.type == "cpu"
            assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), name
            assert tensor.is_contiguous()
    assert [make() for make in makers] == found, "kept"


def test_sizes_may_be_numpys() -> None:
    grid = TokenGrid(np.int64(3), np.uint8(5), 6, np.int16(1))  # type: ignore[arg-type]
    assert grid == TokenGrid(3, 5, 6, 1) and hash(grid) == hash(TokenGrid(3, 5, 6, 1))
    assert {type(getattr(grid, part.name)) for part in fields(grid)} == {int}
    assert type(grid.tokens) is int
    assert grid_order(grid) is grid_order(TokenGrid(3, 5, 6, 1))


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"frames": 0}, "frames is 0; it takes a whole number from 1"),
        ({"width": 2.5}, "width is 2.5; it takes a whole number from 1"),
        ({"height": np.int8(-4)}, "height is .*-4.*; it takes a whole number from 1"),
        ({"suffix": "3"}, "suffix is '3'; it takes a whole number from 0"),
        ({"lead_frames": 5}, "lead_frames is 5; the grid has 4 frames"),
    ],
)
def test_impossible_grids_are_refused(sizes: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(TokenGrid(4, 5, 6), **sizes)


def test_an_order_that_no_rank_shares_is_let_go() -> None:
    """A copy on a GPU goes with it: what is kept of one rank would keep the copies of all grids."""
    grid = TokenGrid(3, 7, 9)
    order = grid_order(grid)
    assert order_as_dealt(order, grid, 1) is order
    gone = weakref.ref(order)
    del order
    grid_module._order_of_kinds.cache_clear()
    gc.collect()
    assert gone() is None


def test_parts_are_dealt_one_after_another_to_each_rank() -> None:
    assert dealt_places((2, 6), 2).tolist() == [0, 2, 3, 4, 1, 5, 6, 7]
    assert dealt_places((3, 4), 2).tolist() == [0, 1, 3, 4, 2, 5, 6], "the first rank has one more"
    assert dealt_places((7,), 3).tolist() == list(range(7))
