# SPDX-License-Identifier: Apache-2.0
"""exact_attention against torch's own attention and against the dense formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sparge.reference import exact_attention

LENGTHS = [1, 64, 129, 799]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_dense_is_torchs_attention(make_qkv, tokens: int, is_causal: bool) -> None:
    q, k, v = make_qkv(2, 4, tokens, 32, kv_heads=2, dtype=torch.float64)
    out, _ = exact_attention(q, k, v, is_causal=is_causal, dtype=torch.float64)
    truth = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    assert (out - truth).abs().max() < 1e-12


@pytest.mark.parametrize("is_causal", [False, True])
def test_map_lengths_and_scale_against_the_formula(
    make_qkv, generator: torch.Generator, is_causal: bool
) -> None:
    n_queries, n_keys, scale = 200, 330, 0.3
    q, k, v = make_qkv(2, 2, n_queries, 16, kv_tokens=n_keys, dtype=torch.float64)
    lengths = torch.tensor([100, 330], dtype=torch.int32)
    kept = torch.rand(2, 2, 2, 6, generator=generator) < 0.5
    kept[1, 1, 1] = False
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "key_lengths": lengths}
    out, lse = exact_attention(q, k, v, kept, dtype=torch.float64, **options)
    seen = kept.repeat_interleave(128, 2)[:, :, :n_queries].repeat_interleave(64, 3)[..., :n_keys]
    seen = seen & (torch.arange(n_keys) < lengths[:, None, None, None])
    if is_causal:
        seen = seen & (torch.arange(n_keys) <= torch.arange(n_queries).unsqueeze(-1))
    weights = torch.where(seen, torch.exp(q @ k.mT * scale), 0)
    total = weights.sum(-1)
    assert (total == 0).any(), "the case should hold rows that see nothing"
    truth = torch.where(total[..., None] > 0, weights @ v / total[..., None], 0)
    assert (out - truth).abs().max() < 1e-12
    assert torch.equal(lse == -torch.inf, total == 0)
    assert (lse - total.log())[total > 0].abs().max() < 1e-12


def test_an_empty_row_gives_zero_and_keys_beyond_the_length_are_never_read(make_qkv) -> None:
    q, k, v = make_qkv(2, 1, 70, 16, dtype=torch.float32)
    k[0] = v[0] = k[1, :, 30:] = v[1, :, 30:] = torch.nan
    out, lse = exact_attention(q, k, v, key_lengths=torch.tensor([0, 30], dtype=torch.int32))
    assert out[0].abs().max() == 0
    assert (lse[0] == -torch.inf).all()
    alone, _ = exact_attention(q[1:], k[1:, :, :30], v[1:, :, :30])
    assert torch.equal(out[1:], alone)


def test_a_nan_input_shows(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 70, 16, dtype=torch.float32)
    q[0, 0, 3] = torch.nan
    out, _ = exact_attention(q, k, v, torch.ones(1, 1, 1, 2, dtype=torch.bool))
    assert out[0, 0, 3].isnan().all()
    assert not out[0, 0, 4:].isnan().any()
