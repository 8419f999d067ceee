# SPDX-License-Identifier: Apache-2.0
"""Causal attention with other numbers of queries than of keys, by the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from sparge import AttentionStats, HeadSettings, Precision, SparsePolicy
from sparge.common.metrics import rel_l2
from sparge.kernels import KernelSpec

pytestmark = pytest.mark.gpu

attention: Any = sparge.attention


def visible(queries: int, keys: int, causal: str) -> Tensor:
    offset = keys - queries if causal == "bottom-right" else 0
    rows = torch.arange(queries, device="cuda").unsqueeze(-1) + offset
    return torch.arange(keys, device="cuda") <= rows


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of float64 attention; rows that see nothing are 0 and -inf."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = q.double() @ k.mT * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~seen, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("causal", ["top-left", "bottom-right"])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(
    ("queries", "keys", "head_dim"),
    [(1, 4000, 128), (1, 65, 64), (130, 2049, 96), (1024, 1536, 64), (700, 300, 128), (300, 1, 40)],
)
def test_sees_what_the_alignment_says(
    make_qkv, poison: None, causal: str, precision: Precision, queries: int, keys: int,
    head_dim: int, launched: list[KernelSpec],
) -> None:  # fmt: skip
    q, k, v = make_qkv(2, 4, queries, head_dim, kv_heads=2, kv_tokens=keys, device="cuda")
    truth, truth_lse = dense(q, k, v, visible(queries, keys, causal))
    policy = SparsePolicy(topk=1.0, precision=precision)
    stats = AttentionStats("cuda")
    out, lse = attention(q, k, v, policy, causal=causal, return_lse=True, stats=stats)
    # Noise attended to by noise, where no error averages out: as in test_contract.rounding.
    assert rel_l2(out, truth) < (0.01 if precision is Precision.SIXTEEN_BIT else 0.06)
    assert torch.equal(lse == -torch.inf, truth_lse == -torch.inf)
    assert torch.where(truth_lse == -torch.inf, 0, lse - truth_lse).abs().max() < 0.1
    assert (stats.calls, stats.density) == (1, 1.0)
    parts = 2 if causal == "bottom-right" and keys > queries else 1
    attends = [spec for spec in launched if spec.entry.startswith("attend")]
    assert len(attends) >= parts  # a part's heads may be served in groups


@pytest.mark.parametrize("pool_weight", [None, 0.5])
@pytest.mark.parametrize(("queries", "keys"), [(256, 2240), (2240, 256)])
def test_sparse_calls_are_those_of_the_reference(
    make_qkv, pool_weight: float | None, queries: int, keys: int
) -> None:
    q, k, v = make_qkv(1, 4, queries, 64, kv_tokens=keys)
    policy = SparsePolicy(topk=0.3, precision=Precision.INT8_FP16, attention_sink=True)
    found = []
    for device in ("cpu", "cuda"):
        stats = AttentionStats(device)
        head_settings = (
            None
            if pool_weight is None
            else HeadSettings.uniform(4, 0.3, pool_weight, device=device)
        )
        given = (x.to(device) for x in (q, k, v))
        out, lse = attention(
            *given,
            policy,
            causal="bottom-right",
            head_settings=head_settings,
            stats=stats,
            return_lse=True,
        )
        found.append((out.cpu(), lse.cpu(), stats.counters.tolist()))
    (out, lse, counters), (truth, truth_lse, truth_counters) = found[1], found[0]
    assert counters == truth_counters
    assert rel_l2(out, truth) < 0.01
    assert torch.equal(lse.isfinite(), truth_lse.isfinite())
    seen = truth_lse.isfinite()
    torch.testing.assert_close(lse[seen], truth_lse[seen], rtol=1e-3, atol=1e-2)


def test_chunks_with_a_cache_are_the_whole(make_qkv) -> None:
    """A text attended to chunk by chunk is the text attended to at once."""
    q, k, v = make_qkv(1, 2, 1500, 128, device="cuda")
    policy = SparsePolicy(topk=1.0, precision=Precision.SIXTEEN_BIT)
    whole = attention(q, k, v, policy, is_causal=True)
    ends = (700, 1400, 1499, 1500)
    chunks = [
        attention(q[:, :, first:end], k[:, :, :end], v[:, :, :end], policy, causal="bottom-right")
        for first, end in zip((0, *ends), ends, strict=False)
    ]
    assert rel_l2(torch.cat(chunks, 2), whole) < 0.01


def test_no_synchronisation(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 128, 64, kv_tokens=900, device="cuda")
    policy = replace(SparsePolicy(topk=0.5), exact_prefix=2**31)
    expected = attention(q, k, v, policy, causal="bottom-right")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attention(q, k, v, policy, causal="bottom-right")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)
    dense_policy = SparsePolicy(topk=1.0)
    assert torch.equal(out, attention(q, k, v, dense_policy, causal="bottom-right")), "all exact"
