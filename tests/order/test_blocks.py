# SPDX-License-Identifier: Apache-2.0
"""The block map's bits, and corner cases of block selection that tests/fuzz lets go either way."""

from __future__ import annotations

import pytest
import torch

from sparge import SparsePolicy
from sparge.blocks import block_count, pack, unpack
from sparge.reference import Operands, route

SCALE = 0.25


@pytest.mark.parametrize("key_blocks", [1, 31, 32, 33, 64, 100])
def test_bit_b_of_word_w_is_block_32w_plus_b(key_blocks: int, generator: torch.Generator) -> None:
    kept = torch.rand(2, 3, 4, key_blocks, generator=generator) < 0.5
    words = pack(kept)
    assert words.dtype == torch.int32
    assert words.shape == (2, 3, 4, block_count(key_blocks, 32))
    for block in range(key_blocks):
        assert torch.equal((words[..., block // 32] >> block % 32) & 1, kept[..., block].int())
    assert torch.equal(unpack(words, key_blocks), kept)


def test_ties_go_to_the_lower_index(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 128, 16)
    k[:] = k[:, :, :1]
    x = Operands.of(q, k.repeat(1, 1, 8, 1), v.repeat(1, 1, 8, 1), smooth_k=False)
    assert len(set(x.k_block_mean.sum(-1).flatten().tolist())) == 1
    for policy in (SparsePolicy(topk=0.26), SparsePolicy(select_by="cdf", cdfthreshd=0.26)):
        kept = route(x, policy, scale=SCALE).kept
        assert kept[0, 0, 0].tolist() == [True] * 4 + [False] * 12


def test_upstreams_rule_that_the_block_crossing_the_mass_stays_out() -> None:
    """Scores ln 0.2, ln 0.5, ln 0.3: inclusive masses 0.5, 0.8, 1."""
    q, k = torch.zeros(1, 1, 128, 16), torch.zeros(1, 1, 192, 16)
    q[..., 0], k[..., 0] = 1, torch.tensor([0.2, 0.5, 0.3]).log().repeat_interleave(64) / SCALE
    x = Operands.of(q, k, k, smooth_k=False)
    for threshold, blocks in [(0.3, [1]), (0.79, [1]), (0.82, [1, 2]), (1.0, [0, 1, 2])]:
        policy = SparsePolicy(select_by="cdf", cdfthreshd=threshold)
        assert route(x, policy, scale=SCALE).kept[0, 0, 0].nonzero().flatten().tolist() == blocks
