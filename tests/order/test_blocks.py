# SPDX-License-Identifier: Apache-2.0
"""The block map's bits, and the pairs behind every density."""

from __future__ import annotations

import pytest
import torch

import sparge
from sparge.blocks import block_count, pack, unpack


@pytest.mark.parametrize("key_blocks", [1, 31, 32, 33, 64, 100])
def test_bit_b_of_word_w_is_block_32w_plus_b(key_blocks: int, generator: torch.Generator) -> None:
    kept = torch.rand(2, 3, 4, key_blocks, generator=generator) < 0.5
    words = pack(kept)
    assert words.dtype == torch.int32
    assert words.shape == (2, 3, 4, block_count(key_blocks, 32))
    for block in range(key_blocks):
        assert torch.equal((words[..., block // 32] >> block % 32) & 1, kept[..., block].int())
    assert torch.equal(unpack(words, key_blocks), kept)


def test_density_counts_pairs_and_not_blocks(make_qkv) -> None:
    """tests/fuzz counts those of random calls."""
    kept = torch.tensor([True, False]).expand(1, 2, 1, 2)
    stats = sparge.AttentionStats("cpu")
    sparge.attention(*make_qkv(1, 2, 100, 64, kv_tokens=65), block_mask=kept, stats=stats)
    assert (stats.density, stats.blocks_kept) == (64 / 65, 2)
    stats.reset()
    nothing = torch.zeros(1, dtype=torch.int32)
    sparge.attention(*make_qkv(1, 2, 5, 64), key_lengths=nothing, stats=stats)
    assert (stats.density, stats.calls) == (1.0, 1), "there is nothing to attend to"
