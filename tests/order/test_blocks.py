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
def test_unpack_undoes_pack(key_blocks: int, generator: torch.Generator) -> None:
    kept = torch.rand(2, 3, 4, key_blocks, generator=generator) < 0.5
    words = pack(kept)
    assert words.dtype == torch.int32
    assert words.shape == (2, 3, 4, block_count(key_blocks, 32))
    assert torch.equal(unpack(words, key_blocks), kept)


@pytest.mark.parametrize("block", [0, 30, 31, 32, 63])
def test_bit_b_of_word_w_is_block_32w_plus_b(block: int) -> None:
    kept = torch.zeros(64, dtype=torch.bool)
    kept[block] = True
    words = [int(word) & 0xFFFFFFFF for word in pack(kept)]
    assert words[block // 32] == 1 << (block % 32)
    assert words[1 - block // 32] == 0


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("n_queries", "n_keys", "lengths"),
    [(1, 1, None), (127, 65, [65, 1]), (129, 799, [0, 640]), (300, 64, [64, 63]), (256, 128, None)],
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
        for i in range(pairs.shape[1]):
            for j in range(pairs.shape[2]):
                block = seen[i * QUERY_BLOCK :, j * KEY_BLOCK :][:QUERY_BLOCK, :KEY_BLOCK]
                assert int(pairs[b, i, j]) == int(block.sum())


def test_density_counts_pairs_and_not_blocks() -> None:
    kept = torch.tensor([[True, False]]).expand(1, 2, 1, 2)
    plan = BlockPlan.from_kept(kept, n_queries=100, n_keys=65)
    assert plan.density() == 64 / 65
    assert plan.kept_pairs().tolist() == [[6400, 6400]]
    assert plan.counts.tolist() == [[[1], [1]]]


def test_nothing_to_attend_to_is_density_one() -> None:
    kept = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    lengths = torch.zeros(1, dtype=torch.int32)
    assert BlockPlan.from_kept(kept, 5, 5, key_lengths=lengths).density() == 1.0


def test_a_map_of_another_shape_is_refused_with_the_shape_it_needs() -> None:
    with pytest.raises(ValueError, match=r"need \(B, H, 2, 4\)"):
        BlockPlan.from_kept(torch.ones(1, 1, 2, 2, dtype=torch.bool), 256, 256)
