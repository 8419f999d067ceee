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
from tests.gpu.conftest import no_waits

pytestmark = pytest.mark.gpu

attention: Any = sparge.attention


def dense(q: Tensor, k: Tensor, v: Tensor, causal: str) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of float64 attention; rows that see nothing are 0 and -inf."""
    queries, keys = q.shape[2], k.shape[2]
    last_seen = torch.arange(queries, device="cuda").unsqueeze(-1)
    if causal == "bottom-right":
        last_seen = last_seen + keys - queries
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = q.double() @ k.mT * q.shape[-1] ** -0.5
    logits = logits.masked_fill(torch.arange(keys, device="cuda") > last_seen, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("causal", ["top-left", "bottom-right"])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(
    ("queries", "keys", "head_dim"),
    [(1, 4000, 128), (1, 65, 64), (130, 2049, 96), (1024, 1536, 64), (700, 300, 128), (300, 1, 40)],
)
def test_sees_what_the_alignment_says(
    make_qkv, poison, causal: str, precision: Precision, queries: int, keys: int, head_dim: int
) -> None:
    q, k, v = make_qkv(2, 4, queries, head_dim, kv_heads=2, kv_tokens=keys, device="cuda")
    truth, truth_lse = dense(q, k, v, causal)
    policy = SparsePolicy(topk=1.0, precision=precision)
    stats = AttentionStats("cuda")
    out, lse = attention(q, k, v, policy, causal=causal, return_lse=True, stats=stats)
    # Noise attended to by noise, where no error averages out: as in test_long_sequences.
    assert rel_l2(out, truth) < (0.01 if precision is Precision.SIXTEEN_BIT else 0.06)
    assert torch.equal(lse == -torch.inf, truth_lse == -torch.inf)
    assert torch.where(truth_lse == -torch.inf, 0, lse - truth_lse).abs().max() < 0.1
    assert (stats.calls, stats.density) == (1, 1.0)


@pytest.mark.parametrize("pool_weight", [None, 0.5])
@pytest.mark.parametrize(("queries", "keys"), [(256, 2240), (2240, 256)])
def test_sparse_calls_are_those_of_the_reference(
    make_qkv, pool_weight: float | None, queries: int, keys: int
) -> None:
    qkv = make_qkv(1, 4, queries, 64, kv_tokens=keys)
    policy = SparsePolicy(topk=0.3, precision=Precision.INT8_FP16, attention_sink=True)

    def run(device: str) -> tuple[Tensor, Tensor, list[int]]:
        stats = AttentionStats(device)
        options: dict[str, Any] = {"stats": stats}
        if pool_weight is not None:
            options["head_settings"] = HeadSettings.uniform(4, 0.3, pool_weight, device=device)
        given = (x.to(device) for x in qkv)
        out, lse = attention(*given, policy, causal="bottom-right", return_lse=True, **options)
        return out.cpu(), lse.cpu(), stats.counters.tolist()

    out, lse, counters = run("cuda")
    truth, truth_lse, truth_counters = run("cpu")
    assert counters == truth_counters
    assert rel_l2(out, truth) < 0.01
    torch.testing.assert_close(lse, truth_lse, rtol=1e-3, atol=1e-2)


def test_no_synchronisation(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 128, 64, kv_tokens=900, device="cuda")
    policy = replace(SparsePolicy(topk=0.5), exact_prefix=2**31)
    expected = attention(q, k, v, policy, causal="bottom-right")
    with no_waits():
        out = attention(q, k, v, policy, causal="bottom-right")
    assert torch.equal(out, expected)
    dense_policy = SparsePolicy(topk=1.0)
    assert torch.equal(out, attention(q, k, v, dense_policy, causal="bottom-right")), "all exact"
