# SPDX-License-Identifier: Apache-2.0
"""The block map's bits, and the pairs behind every density."""

from __future__ import annotations

import pytest
import torch

from sparge.blocks import BlockPlan, block_count, pack, unpack


@pytest.mark.parametrize("key_blocks", [1, 31, 32, 33, 64, 100])
def test_bit_b_of_word_w_is_block_32w_plus_b(key_blocks: int, generator: torch.Generator) -> None:
    kept = torch.rand(2, 3, 4, key_blocks, generator=generator) < 0.5
    words = pack(kept)
    assert words.dtype == torch.int32
    assert words.shape == (2, 3, 4, block_count(key_blocks, 32))
    for block in range(key_blocks):
        assert torch.equal((words[..., block // 32] >> block % 32) & 1, kept[..., block].int())
    assert torch.equal(unpack(words, key_blocks), kept)


def test_density_counts_pairs_and_not_blocks() -> None:
    """tests/fuzz counts those of calls."""
    kept = torch.tensor([[True, False]]).expand(1, 2, 1, 2)
    plan = BlockPlan.from_kept(kept, n_queries=100, n_keys=65)
    assert plan.density() == 64 / 65
    assert plan.kept_pairs().tolist() == [[6400, 6400]]
    assert plan.counts.tolist() == [[[1], [1]]]
    lengths = torch.zeros(1, dtype=torch.int32)
    nothing = BlockPlan.from_kept(torch.zeros(1, 1, 1, 1).bool(), 5, 5, key_lengths=lengths)
    assert nothing.density() == 1.0, "there is nothing to attend to"
    with pytest.raises(ValueError, match=r"need \(B, H, 2, 4\)"):
        BlockPlan.from_kept(torch.ones(1, 1, 2, 2, dtype=torch.bool), 256, 256)
