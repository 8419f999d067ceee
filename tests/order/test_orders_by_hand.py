# SPDX-License-Identifier: Apache-2.0
"""Orders made or changed by hand: kernels read their tensors as they lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import sparge
from benchmarks.metrics import rel_l2
from sparge import SparsePolicy, TokenGrid, cube_order, grid_order

attention: Any = sparge.attention
SPARSE = SparsePolicy(topk=0.4)
GRID = TokenGrid(2, 8, 10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slot_tokens": lambda x: x.long()}, "slot_tokens is torch.int64"),
        ({"slot_tokens": lambda x: x[0]}, r"slot_tokens is torch.int32 of shape \(192,\)"),
        ({"slot_tokens": lambda x: x.numpy()}, "slot_tokens is a numpy.ndarray"),
        ({"slot_tokens": lambda x: x.T.contiguous().T}, "slot_tokens must be contiguous"),
        ({"slot_tokens": lambda x: x + 5}, "do not belong together"),
        ({"token_slots": lambda x: x[:1]}, "token_slots is torch.int32 of shape"),
        ({"token_slots": lambda x: x + 200}, "do not belong together"),
        ({"token_slots": lambda x: x.roll(1, 1)}, "do not belong together"),
        ({"token_slots": lambda x: x.to("meta")}, "token_slots must be contiguous and on cpu"),
        ({"block_counts": lambda x: x - 1}, "do not belong together"),
        ({"block_counts": lambda x: x * 0 + 65}, "do not belong together"),
        ({"block_counts": lambda x: x[:2]}, "is torch.int32 of shape"),
        ({"keys_exact": lambda x: x.int()}, "keys_exact is torch.int32"),
        ({"queries_exact": lambda x: x[:1]}, "queries_exact is torch.bool of shape"),
    ],
)
def test_made_by_hand_of_other_tensors(change: dict[str, Any], words: str) -> None:
    order = grid_order(GRID)
    changed = {name: make(getattr(order, name)) for name, make in change.items()}
    with pytest.raises(ValueError, match=words):
        replace(order, **changed)


def test_orders_of_other_tokens_are_served(make_qkv) -> None:
    """Parallel attention makes them, whose sequence comes in another order."""
    order = cube_order(GRID)
    places = torch.randperm(GRID.tokens, generator=torch.Generator().manual_seed(3))
    inverse = places.argsort()
    taken = torch.where(
        order.slot_tokens < 0, -1, inverse[order.slot_tokens.long()].to(torch.int32)
    ).to(torch.int32)
    moved = replace(order, slot_tokens=taken, token_slots=order.token_slots[:, places])
    q, k, v = make_qkv(1, 2, GRID.tokens, 64)
    expected = attention(q, k, v, SPARSE, order=order)
    found = attention(*(x[:, :, places] for x in (q, k, v)), SPARSE, order=moved)
    assert rel_l2(found, expected[:, :, places]) < 1e-3


def test_on_another_device_only_what_costs_no_wait_is_looked_at() -> None:
    order = grid_order(GRID).on("meta")
    assert order.of_kind(1).order_kinds == 1
    with pytest.raises(ValueError, match=r"block_counts is torch.int64"):
        replace(order, block_counts=order.block_counts.long())
