# SPDX-License-Identifier: Apache-2.0
"""Operands whose batch, heads or tokens are one memory (stride 0), as models expand them."""

from __future__ import annotations

import pytest
import torch

import sparge

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [64, 128, 72])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_they_give_what_copies_give(generator: torch.Generator, dim: int, head_dim: int) -> None:
    q, k, v = (
        torch.randn(2, 3, 700, head_dim, generator=generator).to("cuda", torch.bfloat16)
        for _ in "qkv"
    )
    k, v = (x.narrow(dim, 0, 1).expand_as(x) for x in (k, v))
    assert k.stride(dim) == v.stride(dim) == 0
    policy = sparge.SparsePolicy(topk=0.5)
    copies = sparge.attention(q, k.contiguous(), v.contiguous(), policy)
    assert torch.equal(sparge.attention(q, k, v, policy), copies)
