# SPDX-License-Identifier: Apache-2.0
"""exact_attention against torch's own attention, and rows without keys; `test_pooled` has more."""

from __future__ import annotations

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


def test_an_empty_row_gives_zero_and_keys_beyond_the_length_are_never_read(make_qkv) -> None:
    q, k, v = make_qkv(2, 1, 70, 16, dtype=torch.float32)
    k[0] = v[0] = k[1, :, 30:] = v[1, :, 30:] = torch.nan
    out, lse = exact_attention(q, k, v, key_lengths=torch.tensor([0, 30], dtype=torch.int32))
    assert out[0].abs().max() == 0
    assert (lse[0] == -torch.inf).all()
    alone, _ = exact_attention(q[1:], k[1:, :, :30], v[1:, :, :30])
    assert torch.equal(out[1:], alone)
    nothing = torch.zeros(1, 1, 1, 2, dtype=torch.bool)
    out, lse = exact_attention(q[:1], q[:1], q[:1], nothing)
    assert not out.any() and (lse == -torch.inf).all()


def test_a_nan_input_shows(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 70, 16, dtype=torch.float32)
    q[0, 0, 3] = torch.nan
    out, _ = exact_attention(q, k, v, torch.ones(1, 1, 1, 2, dtype=torch.bool))
    assert out[0, 0, 3].isnan().all()
    assert not out[0, 0, 4:].isnan().any()
