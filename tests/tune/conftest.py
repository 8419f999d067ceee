# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of measurement."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tune.begun import GRID


@pytest.fixture
def qkv(make_qkv) -> tuple[Tensor, Tensor, Tensor]:
    """Three heads over one KV head, whose neighbouring keys are alike, from flat to peaked."""
    q, k, v = (x.float() for x in make_qkv(1, 3, GRID.tokens, 16, kv_heads=1))
    drift = torch.linspace(0, 60, GRID.tokens)[None, None, :, None]
    k = k + 2 * torch.sin(drift + torch.arange(16))
    q = q * torch.tensor([0.5, 1.0, 2.0])[:, None, None]
    return q.bfloat16(), k.bfloat16(), v.bfloat16()
