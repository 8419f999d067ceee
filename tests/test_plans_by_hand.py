# SPDX-License-Identifier: Apache-2.0
"""Plans and orders made or changed by hand: kernels read their tensors as they lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import sparge
from sparge import AttentionStats, BlockPlan, SparsePolicy, TokenGrid, cube_order, grid_order
from sparge.common.metrics import rel_l2

attention: Any = sparge.attention
SPARSE, DENSE = SparsePolicy(topk=0.4), SparsePolicy(topk=1.0)
GRID = TokenGrid(2, 8, 10)


class TestPlans:
    """Kernels read maps where they lie, as they were told that those are."""

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda m, c: (m.long(), c), "block_map is torch.int64 of shape .* need int32"),
            (lambda m, c: (m, c.long()), "counts is torch.int64"),
            (lambda m, c: (torch.cat([m, m], -1), c), r"block_map is torch.int32 of .* 2, 3, 2\)"),
            (lambda m, c: (m, c[..., :2]), "counts is torch.int32 of shape"),
            (lambda m, c: (m.flatten(), c), "block_map is torch.int32 of shape"),
            (lambda m, c: (m, c.tolist()), "counts is a list; give a torch tensor"),
            (lambda m, c: (m, c.to("meta")), "block_map is on cpu and counts on meta"),
            (lambda m, c: (m, c, 300.0, 300), "n_queries is 300.0; it takes a whole number from 1"),
            (lambda m, c: (m, c, 300, 0), "n_keys is 0; it takes a whole number from 1"),
            (lambda m, c: (m, c, 300, 5000), "block_map is .* 5000 keys need int32"),
            (lambda m, c: (m, c, 300, 300, "no"), "is_causal is 'no'"),
        ],
    )
    def test_made_by_hand_of_other_tensors_or_sizes(self, make_qkv, change, words: str) -> None:
        q, k, _ = make_qkv(1, 2, 300, 64)
        plan = sparge.make_plan(q, k, SPARSE)
        block_map, counts, *sizes = change(plan.block_map, plan.counts)
        with pytest.raises(ValueError, match=words):
            BlockPlan(block_map, counts, *(sizes or [300, 300]))

    def test_key_lengths_that_are_no_tensor_or_of_another_type(self, make_qkv) -> None:
        """Kernels read them as int32, one for each batch entry."""
        q, k, v = make_qkv(2, 2, 300, 64)
        plan = sparge.make_plan(q, k, SPARSE)
        for lengths in ([300], torch.tensor([200, 100]), torch.tensor([200]).int()):
            words = r"is a list; give a torch tensor|give int32 of shape \(2,\)"
            with pytest.raises(ValueError, match=words):
                attention(q, k, v, plan=replace(plan, key_lengths=lengths))

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_blocks_without_a_pair_do_not_count(self, make_qkv, is_causal: bool) -> None:
        """A map of ones keeps what dense attention would visit, however it is said."""
        q, k, v = make_qkv(1, 2, 500, 64)
        lengths = torch.tensor([100], dtype=torch.int32)
        kept = BlockPlan.from_kept(torch.ones(1, 2, 4, 8), 500, 500, is_causal, lengths)
        ones = torch.full((1, 2, 4, 1), -1, dtype=torch.int32)
        stray = BlockPlan(ones, kept.counts, 500, 500, is_causal, lengths)
        expected = attention(q, k, v, DENSE, is_causal=is_causal, key_lengths=lengths)
        for plan in (kept, stray):
            stats = AttentionStats("cpu")
            assert torch.equal(attention(q, k, v, plan=plan, stats=stats), expected)
            assert (stats.blocks_kept, stats.density) == (2 * 4 * 2, 1.0)
        assert int(kept.counts.sum()) == 2 * 4 * 2

    def test_from_what_is_no_map(self) -> None:
        kept: Any = [[True]]
        with pytest.raises(ValueError, match="kept is a list; give a torch tensor"):
            BlockPlan.from_kept(kept, 300, 300)


class TestOrders:
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
    def test_made_by_hand_of_other_tensors(self, change: dict[str, Any], words: str) -> None:
        order = grid_order(GRID)
        changed = {name: make(getattr(order, name)) for name, make in change.items()}
        with pytest.raises(ValueError, match=words):
            replace(order, **changed)

    def test_those_of_other_tokens_are_served(self, make_qkv) -> None:
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

    def test_on_another_device_only_what_costs_no_wait_is_looked_at(self) -> None:
        order = grid_order(GRID).on("meta")
        assert order.of_kind(1).order_kinds == 1
        with pytest.raises(ValueError, match=r"block_counts is torch.int64"):
            replace(order, block_counts=order.block_counts.long())
