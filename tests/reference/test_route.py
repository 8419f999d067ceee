# SPDX-License-Identifier: Apache-2.0
"""Block selection against the rules spelt out one query block at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sparge.policy import SparsePolicy
from sparge.reference import Quantized, quantize_qkv, route

SCALE = 0.25


def number(value: float | torch.Tensor, head: int) -> float:
    return float(value[head]) if isinstance(value, torch.Tensor) else value


def naive_route(x: Quantized, policy: SparsePolicy, is_causal: bool) -> torch.Tensor:
    """Plain loops and Python's sort, from the words of the design."""
    kept = torch.zeros(
        x.batch, x.heads, x.q_block_mean.shape[2], x.k_block_mean.shape[2], dtype=torch.bool
    )
    n_blocks = kept.shape[3]
    for b in range(x.batch):
        length = int(x.key_counts[b].sum())
        for h in range(x.heads):
            kv, gate = h // (x.heads // x.kv_heads), number(policy.simthreshd1, h)
            for i in range(kept.shape[2]):
                first, last = 128 * i, min(128 * i + 127, x.n_queries - 1)
                ranked: list[tuple[float, int]] = []
                valid: list[int] = []
                for j in range(n_blocks):
                    start, end = 64 * j, min(64 * j + 64, length)
                    if end <= start or (is_causal and start > last):
                        continue
                    valid.append(j)
                    forced = float(x.k_self_similarity[b, kv, j]) <= gate
                    forced |= start < policy.exact_prefix or end > length - policy.exact_suffix
                    forced |= policy.attention_sink and j == 0
                    forced |= is_causal and policy.keep_diagonal and start + 63 >= first
                    score = x.q_block_mean[b, h, i] @ x.k_block_mean[b, kv, j] * SCALE
                    kept[b, h, i, j] = forced
                    if not forced:
                        ranked.append((-float(score), j))
                ranked.sort()
                if policy.select_by == "topk":
                    budget = max(1, int(number(policy.topk, h) * n_blocks))
                else:
                    mass = [math.exp(ranked[0][0] - negative) for negative, _ in ranked]
                    so_far, budget = 0.0, 0
                    while budget < len(mass):
                        so_far += mass[budget]
                        if so_far > number(policy.cdfthreshd, h) * sum(mass):
                            break
                        budget += 1
                    budget = max(1, budget)
                for _, j in ranked[:budget]:
                    kept[b, h, i, j] = True
                dense = float(x.q_self_similarity[b, h, i]) <= gate
                dense |= first < policy.exact_prefix or last >= x.n_queries - policy.exact_suffix
                if dense:
                    kept[b, h, i, valid] = True
    return kept


POLICIES = {
    "topk": SparsePolicy(topk=0.3),
    "topk keeps one": SparsePolicy(topk=0.0),
    "topk all": SparsePolicy(topk=1.0),
    "topk by head": SparsePolicy(topk=torch.tensor([0.1, 0.9, 0.4, 0.0])),
    "cdf": SparsePolicy(select_by="cdf", cdfthreshd=0.8),
    "cdf keeps one": SparsePolicy(select_by="cdf", cdfthreshd=0.0),
    "cdf by head": SparsePolicy(select_by="cdf", cdfthreshd=torch.tensor([0.2, 0.9, 0.5, 0.7])),
    "gate": SparsePolicy(topk=0.2, simthreshd1=0.1),
    "gate by head": SparsePolicy(topk=0.2, simthreshd1=torch.tensor([-1.0, 0.08, 0.12, 1.0])),
    "sink": SparsePolicy(topk=0.2, attention_sink=True),
    "no diagonal": SparsePolicy(topk=0.2, keep_diagonal=False),
    "prefix": SparsePolicy(topk=0.2, exact_prefix=70),
    "suffix": SparsePolicy(select_by="cdf", cdfthreshd=0.3, exact_suffix=10),
    "everything": SparsePolicy(
        topk=0.2, simthreshd1=0.1, attention_sink=True, exact_prefix=3, exact_suffix=130
    ),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_selection_is_the_naive_one(make_qkv, policy: SparsePolicy, is_causal: bool) -> None:
    # Correlated neighbours, so that block means differ and the gate's thresholds cut in the middle.
    q, k, v = make_qkv(2, 4, 700, 16, kv_heads=2, kv_tokens=1000, dtype=torch.float32)
    q, k = (x + x.cumsum(2) / 30 for x in (q, k))
    lengths = torch.tensor([1000, 610], dtype=torch.int32)
    x = quantize_qkv(q, k, v, key_lengths=lengths)
    plan = route(x, policy, scale=SCALE, is_causal=is_causal)
    expected = naive_route(x, policy, is_causal)
    assert torch.equal(plan.kept(), expected)
    assert torch.equal(plan.counts, expected.sum(-1, dtype=torch.int32))
    assert plan.is_causal == is_causal


def test_ties_go_to_the_lower_index(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 128, 16)
    k[:] = k[:, :, :1]
    x = quantize_qkv(q, k.repeat(1, 1, 8, 1), v.repeat(1, 1, 8, 1), smooth_k=False)
    assert len(set(x.k_block_mean.sum(-1).flatten().tolist())) == 1
    for policy in (SparsePolicy(topk=0.26), SparsePolicy(select_by="cdf", cdfthreshd=0.26)):
        kept = route(x, policy, scale=SCALE).kept()
        assert kept[0, 0, 0].tolist() == [True] * 4 + [False] * 12


def test_upstreams_rule_that_the_block_crossing_the_mass_stays_out(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 128, 16, kv_tokens=192)
    x = quantize_qkv(q, k, v)
    unit = torch.zeros(16)
    unit[0] = 1
    # Scores ln 0.5, ln 0.3, ln 0.2: inclusive masses 0.5, 0.8, 1.
    scores = torch.tensor([0.2, 0.5, 0.3]).log() / SCALE
    x = replace(
        x,
        q_block_mean=unit.expand(1, 1, 1, 16),
        k_block_mean=(scores.unsqueeze(-1) * unit).expand(1, 1, 3, 16),
    )
    for threshold, blocks in [
        (0.3, [1]),
        (0.6, [1]),
        (0.79, [1]),
        (0.81, [1, 2]),
        (1.0, [0, 1, 2]),
    ]:
        policy = SparsePolicy(select_by="cdf", cdfthreshd=threshold)
        assert route(x, policy, scale=SCALE).kept()[0, 0, 0].nonzero().flatten().tolist() == blocks


def test_zero_rows_are_similar_to_nothing_and_stay(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 256, 16, kv_tokens=640)
    k[:, :, 128:192] = 0
    x = quantize_qkv(q + 3, k, v, smooth_k=False)
    assert float(x.k_self_similarity[0, 0, 2]) == 0
    kept = route(x, SparsePolicy(topk=0.1, simthreshd1=0.0), scale=SCALE).kept()
    assert kept[0, 0, :, 2].all()
    assert kept.sum() == 4


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_block_mask_is_taken_as_it_is(make_qkv, generator, is_causal: bool) -> None:
    q, k, v = make_qkv(2, 2, 300, 16)
    x = quantize_qkv(q, k, v, key_lengths=torch.tensor([300, 100], dtype=torch.int32))
    mask = torch.rand(2, 2, 3, 5, generator=generator) < 0.5
    policy = SparsePolicy(simthreshd1=1.0, attention_sink=True, exact_prefix=300)
    kept = route(x, policy, scale=SCALE, is_causal=is_causal, block_mask=mask.int()).kept()
    for b in range(2):
        for i in range(3):
            for j in range(5):
                valid = 64 * j < (300, 100)[b] and (not is_causal or 64 * j <= 128 * i + 127)
                assert torch.equal(kept[b, :, i, j], mask[b, :, i, j] & valid)


def test_no_keys_keep_no_blocks(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 200, 16)
    x = quantize_qkv(q, k, v, key_lengths=torch.zeros(1, dtype=torch.int32))
    policy = SparsePolicy(select_by="cdf", attention_sink=True, exact_prefix=10, exact_suffix=10)
    plan = route(x, policy, scale=SCALE)
    assert not plan.kept().any()
    assert plan.density() == 1.0
