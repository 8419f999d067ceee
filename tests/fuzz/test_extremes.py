# SPDX-License-Identifier: Apache-2.0
"""Logits of every size: q = k = c randn for c from 1e-30 to 1e4. Where they are large a row attends
to itself alone, where they are tiny to all keys alike; nothing is NaN or 0 in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge import Precision, SparsePolicy
from tests.fuzz.check import run
from tests.fuzz.draw import Case

SIZES = (1e-30, 1e-18, 1e-6, 1e-3, 1.0, 30.0, 700.0, 1e4)


@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False)])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("size", SIZES)
def test_as_float64_says(
    device: str, size: float, precision: Precision, head_dim: int, is_causal: bool
) -> None:
    q, v = _noise(head_dim, is_causal, device)
    data = "noise" if 1e-3 <= size <= 30 else "tiny"  # rounding errors of tiny logits are alike
    assert not _faults(data, (q * size).bfloat16(), v.bfloat16(), precision, is_causal)


@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False)])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("size", [1e37, 1e-37])
def test_large_and_tiny_values_stay_finite(
    device: str, size: float, precision: Precision, head_dim: int, is_causal: bool
) -> None:
    """Sums of large ones over a row overflow float32 unless they are divided by the row's sum
    first; the scale of tiny ones may have no reciprocal."""
    q, v = _noise(head_dim, is_causal, device)
    v = size * (1 + v / 8)
    assert not _faults("tiny", (q * 700).bfloat16(), v.bfloat16(), precision, is_causal)


def _noise(head_dim: int, is_causal: bool, device: str) -> tuple[Tensor, Tensor]:
    """Queries and values. 131 and 200 tokens: ragged blocks, which masked scores were NaN in."""
    generator = torch.Generator().manual_seed(head_dim)
    shape = (1, 2, 131 if is_causal else 200, head_dim)
    q, v = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    return q, v


def _faults(
    data: str, q: Tensor, v: Tensor, precision: Precision, is_causal: bool
) -> Sequence[str]:
    policy = SparsePolicy(topk=1.0, precision=precision)
    options: dict[str, Any] = {"is_causal": is_causal, "output_dtype": torch.float32}
    options["return_lse"] = True
    return run(Case(0, "attention", data, q, q, v, policy, "HND", options)).faults
