# SPDX-License-Identifier: Apache-2.0
"""Dense calls beside torch's attention, and corner cases of block selection; tests/fuzz has all the
rest."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sparge.policy import SparsePolicy
from sparge.reference import Operands, attention, route

SCALE = 0.25


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 129, 799])
def test_dense_is_torchs_attention(make_qkv, tokens: int, is_causal: bool) -> None:
    q, k, v = make_qkv(2, 4, tokens, 16, kv_heads=2)
    found, routed = attention(q, k + 2, v, SparsePolicy(topk=1.0), scale=SCALE, is_causal=is_causal)
    q, k, v = (x.double() for x in (q, k + 2, v))
    truth = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    assert routed.density() == 1 and (found.out - truth).abs().max() < 1e-5


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
