# SPDX-License-Identifier: Apache-2.0
"""The block map's bits, and the counts of pairs behind every density."""

from __future__ import annotations

import pytest
import torch

from sparge.blocks import (
    KEY_BLOCK,
    QUERY_BLOCK,
    BlockPlan,
    block_count,
    block_pairs,
    count_keys,
    pack,
    unpack,
)


@pytest.mark.parametrize("key_blocks", [1, 31, 32, 33, 64, 100])
def test_bit_b_of_word_w_is_block_32w_plus_b(key_blocks: int, generator: torch.Generator) -> None:
    kept = torch.rand(2, 3, 4, key_blocks, generator=generator) < 0.5
    words = pack(kept)
    assert words.dtype == torch.int32
    assert words.shape == (2, 3, 4, block_count(key_blocks, 32))
    for block in range(key_blocks):
        assert torch.equal((words[..., block // 32] >> block % 32) & 1, kept[..., block].int())
    assert torch.equal(unpack(words, key_blocks), kept)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("n_queries", "n_keys", "lengths"),
    [(1, 1, None), (127, 65, [65, 1]), (129, 799, [0, 640]), (300, 64, [64, 63])],
)
def test_pairs_are_those_of_the_dense_mask(
    n_queries: int, n_keys: int, lengths: list[int] | None, is_causal: bool
) -> None:
    key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    counts = count_keys(n_keys, key_lengths, batch=2, device=torch.device("cpu"))
    pairs = block_pairs(n_queries, counts, is_causal)
    for b, length in enumerate(lengths or [n_keys, n_keys]):
        seen = torch.arange(n_keys).expand(n_queries, -1) < length
        if is_causal:
            seen = seen & (torch.arange(n_keys) <= torch.arange(n_queries).unsqueeze(-1))
        for i, rows in enumerate(seen.split(QUERY_BLOCK)):
            expected = [int(block.sum()) for block in rows.split(KEY_BLOCK, 1)]
            assert pairs[b, i].tolist() == expected


def test_density_counts_pairs_and_not_blocks() -> None:
    kept = torch.tensor([[True, False]]).expand(1, 2, 1, 2)
    plan = BlockPlan.from_kept(kept, n_queries=100, n_keys=65)
    assert plan.density() == 64 / 65
    assert plan.kept_pairs().tolist() == [[6400, 6400]]
    assert plan.counts.tolist() == [[[1], [1]]]
    lengths = torch.zeros(1, dtype=torch.int32)
    nothing = BlockPlan.from_kept(torch.zeros(1, 1, 1, 1).bool(), 5, 5, key_lengths=lengths)
    assert nothing.density() == 1.0, "there is nothing to attend to"


def test_a_map_of_another_shape_is_refused_with_the_shape_it_needs() -> None:
    with pytest.raises(ValueError, match=r"need \(B, H, 2, 4\)"):
        BlockPlan.from_kept(torch.ones(1, 1, 2, 2, dtype=torch.bool), 256, 256)
