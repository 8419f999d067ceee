# SPDX-License-Identifier: Apache-2.0
"""Causal attention with other numbers of queries than of keys, beside float64 dense attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from benchmarks.metrics import rel_l2
from sparge import AttentionStats, HeadSettings, Precision, SparsePolicy

attention: Any = sparge.attention
DENSE = SparsePolicy(topk=1.0, precision=Precision.SIXTEEN_BIT)
SPARSE = SparsePolicy(topk=0.3)


def visible(queries: int, keys: int, causal: str) -> Tensor:
    """(queries, keys) bool, from the two definitions."""
    offset = keys - queries if causal == "bottom-right" else 0
    return torch.arange(keys) <= torch.arange(queries).unsqueeze(-1) + offset


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of float64 attention; rows that see nothing are 0 and -inf."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = q.double() @ k.mT / math.sqrt(q.shape[-1])
    logits = logits.masked_fill(~seen, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0) @ v, logits.logsumexp(-1)


def assert_same_rows(lse: Tensor, truth: Tensor, limit: float = 0.02) -> None:
    assert torch.equal(lse == -torch.inf, truth == -torch.inf)
    assert torch.where(truth == -torch.inf, 0, lse - truth).abs().max() < limit


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("causal", ["top-left", "bottom-right"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 600), (130, 257), (257, 130), (300, 1)])
def test_sees_what_the_alignment_says(make_qkv, queries, keys, causal, precision) -> None:
    q, k, v = make_qkv(2, 4, queries, 64, kv_heads=2, kv_tokens=keys)
    policy = replace(DENSE, precision=precision)
    truth, truth_lse = dense(q, k, v, visible(queries, keys, causal))
    out, lse = attention(q, k, v, policy, causal=causal, return_lse=True)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert rel_l2(out, truth) < 0.02
    assert_same_rows(lse, truth_lse, 0.02 if precision is Precision.SIXTEEN_BIT else 0.1)
    given = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    for out_layout in ("NHD", "HND"):
        again = attention(*given, policy, causal=causal, layout="NHD", out_layout=out_layout)
        assert again.is_contiguous()
        assert torch.equal(again if out_layout == "HND" else again.transpose(1, 2), out)


def test_is_causal_alone_means_the_square_case(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 300, 64)
    expected = attention(q, k, v, SPARSE, is_causal=True)
    for causal in ("top-left", "bottom-right"):
        for named in ({}, {"is_causal": True}):
            assert torch.equal(attention(q, k, v, SPARSE, causal=causal, **named), expected)


@pytest.mark.parametrize(("queries", "keys"), [(1, 600), (300, 200)])
def test_is_causal_alone_is_refused_where_it_may_mean_two_things(make_qkv, queries, keys) -> None:
    q, k, v = make_qkv(1, 2, queries, 64, kv_tokens=keys)
    words = f"is_causal=True with {queries} queries and {keys} keys may mean two things: say causal"
    with pytest.raises(sparge.Unsupported, match=words):
        attention(q, k, v, is_causal=True)


def test_stats_are_of_both_parts_and_the_sink_is_the_first_key_of_all(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 256, 64, kv_tokens=896)
    # Of 10 key blocks 3 for each query block, of 4 one and the two on the diagonal.
    blocks = 2 * ((3 + 3) + (2 + 3))
    for sink, kept in ((False, blocks), (True, blocks + 2 * 2)):
        stats, policy = AttentionStats("cpu"), replace(SPARSE, attention_sink=sink)
        attention(q, k, v, policy, causal="bottom-right", stats=stats)
        assert stats.sparse_calls == 1 and stats.blocks_kept == kept
        assert stats.counters[1] == 2 * int(visible(256, 896, "bottom-right").sum())
    stats.reset()
    attention(*make_qkv(1, 2, 300, 64, kv_tokens=100), DENSE, causal="bottom-right", stats=stats)
    counted = stats.sparse_calls, stats.density, int(stats.counters[1])
    assert counted == (1, 1.0, 2 * 100 * 101 // 2)


@pytest.mark.parametrize(("queries", "keys"), [(200, 840), (840, 200)])
def test_a_block_mask_is_cut_where_whole_blocks_allow(make_qkv, generator, queries, keys) -> None:
    q, k, v = make_qkv(1, 2, queries, 64, kv_tokens=keys)
    mask = torch.rand(1, 2, -(-queries // 128), -(-keys // 64), generator=generator) < 0.6
    kept = mask.repeat_interleave(128, 2).repeat_interleave(64, 3)[:, :, :queries, :keys]
    truth, truth_lse = dense(q, k, v, visible(queries, keys, "bottom-right") & kept)
    out, lse = attention(q, k, v, DENSE, causal="bottom-right", block_mask=mask, return_lse=True)
    assert rel_l2(out, truth) < 0.01
    assert_same_rows(lse, truth_lse)
    ragged = make_qkv(1, 2, queries, 64, kv_tokens=keys - 1)
    with pytest.raises(sparge.Unsupported, match="differ by whole blocks of"):
        attention(*ragged, DENSE, causal="bottom-right", block_mask=mask)


def test_head_settings_serve_both_parts(make_qkv) -> None:
    """All keys of a block are the same, so pooled ones stand for them to the letter."""
    q, k, v = make_qkv(1, 2, 128, 64, kv_tokens=1152)
    k, v = (x[:, :, ::64].repeat_interleave(64, 2) for x in (k, v))
    truth, _ = dense(q, k, v, visible(128, 1152, "bottom-right"))
    for pool_weight in (0.0, 1.0):
        stats, head_settings = AttentionStats("cpu"), HeadSettings.uniform(2, 0.25, pool_weight)
        named = {"causal": "bottom-right", "head_settings": head_settings, "stats": stats}
        out = attention(q, k, v, DENSE, **named)
        assert stats.density < 0.4
        assert (rel_l2(out, truth) < 0.02) == (pool_weight == 1)


@pytest.mark.parametrize(("prefix", "suffix"), [(70, 0), (0, 300), (700, 0)])
def test_exact_tokens_are_those_of_the_sequence(make_qkv, prefix: int, suffix: int) -> None:
    """Keys that are exact are never dropped, nor is anything by queries that are."""
    q, k, v = make_qkv(1, 1, 256, 64, kv_tokens=896)
    lone = replace(DENSE, topk=0.0, exact_prefix=prefix, exact_suffix=suffix)
    full, least = (attention(q, k, v, policy, causal="bottom-right") for policy in (DENSE, lone))
    exact = (torch.arange(896) < prefix) | (torch.arange(896) >= 896 - suffix)
    rows = exact[-256:]
    assert torch.allclose(full[:, :, rows].float(), least[:, :, rows].float(), atol=0.02)
    v[:, :, exact] += 1000
    moved = attention(q, k, v, lone, causal="bottom-right", output_dtype=torch.float32)
    held = visible(256, 896, "bottom-right")[:, exact].any(-1)
    assert (moved[0, 0, held].mean(-1) > 1).all()


@pytest.mark.parametrize(("queries", "keys", "before"), [(256, 896, 2 * 2 * 10), (896, 256, 0)])
def test_tokens_behind_the_exact_prefix_are_sparse(make_qkv, queries, keys, before) -> None:
    """before: blocks of the rectangle, all of whose keys are exact."""
    least, square = replace(SPARSE, topk=0.0), AttentionStats("cpu")
    attention(*make_qkv(1, 2, 256, 64), least, is_causal=True, stats=square)
    for prefix, more in ((640, 0), (640 + 64, 2)):  # of a query block each head sees one key more
        stats = AttentionStats("cpu")
        policy = replace(least, exact_prefix=prefix)
        qkv = make_qkv(1, 2, queries, 64, kv_tokens=keys)
        attention(*qkv, policy, causal="bottom-right", stats=stats)
        assert stats.blocks_kept == before + square.blocks_kept + more


def test_what_bottom_right_does_not_serve(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 100, 64, kv_tokens=600)
    scaled = replace(HeadSettings.uniform(2, 0.5), output_scale=torch.ones(2))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"key_lengths": torch.tensor([500], dtype=torch.int32)}, "last valid one"),
        ({"order": sparge.grid_order(sparge.TokenGrid(1, 8, 8))}, "token order and is_"),
        ({"head_settings": scaled}, "have an output_scale"),
    ]
    for named, words in cases:
        with pytest.raises(sparge.Unsupported, match=words):
            attention(q, k, v, causal="bottom-right", **named)
