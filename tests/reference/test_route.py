# SPDX-License-Identifier: Apache-2.0
"""Corner cases of block selection; `tests.fuzz.routing` judges the rest."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparge.policy import SparsePolicy
from sparge.reference import quantize_qkv, route

SCALE = 0.25


def test_ties_go_to_the_lower_index(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 128, 16)
    k[:] = k[:, :, :1]
    x = quantize_qkv(q, k.repeat(1, 1, 8, 1), v.repeat(1, 1, 8, 1), smooth_k=False)
    assert len(set(x.k_block_mean.sum(-1).flatten().tolist())) == 1
    for policy in (SparsePolicy(topk=0.26), SparsePolicy(select_by="cdf", cdfthreshd=0.26)):
        kept = route(x, policy, scale=SCALE).kept
        assert kept[0, 0, 0].tolist() == [True] * 4 + [False] * 12


def test_upstreams_rule_that_the_block_crossing_the_mass_stays_out(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 128, 16, kv_tokens=192)
    x = quantize_qkv(q, k, v)
    unit = torch.zeros(16)
    unit[0] = 1
    # Scores ln 0.5, ln 0.3, ln 0.2: inclusive masses 0.5, 0.8, 1.
    scores = torch.tensor([0.2, 0.5, 0.3]).log() / SCALE
    means = (scores.unsqueeze(-1) * unit).expand(1, 1, 3, 16)
    x = replace(x, q_block_mean=unit.expand(1, 1, 1, 16), k_block_mean=means)
    for threshold, blocks in [(0.3, [1]), (0.79, [1]), (0.81, [1, 2]), (1.0, [0, 1, 2])]:
        policy = SparsePolicy(select_by="cdf", cdfthreshd=threshold)
        assert route(x, policy, scale=SCALE).kept[0, 0, 0].nonzero().flatten().tolist() == blocks


def test_zero_rows_are_similar_to_nothing_and_stay(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 256, 16, kv_tokens=640)
    k[:, :, 128:192] = 0
    x = quantize_qkv(q + 3, k, v, smooth_k=False)
    assert float(x.k_self_similarity[0, 0, 2]) == 0
    kept = route(x, SparsePolicy(topk=0.1, simthreshd1=0.0), scale=SCALE).kept
    assert kept[0, 0, :, 2].all()
    assert kept.sum() == 4
