# SPDX-License-Identifier: Apache-2.0
"""Logits of every size: q = k = c randn for c from 1e-30 to 1e4. Where they are large a row attends
to itself alone, where they are tiny to all keys alike; nothing is NaN or 0 in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparge import Precision, SparsePolicy
from tests.fuzz.check import run
from tests.fuzz.draw import Case

#: Sizes of queries and keys, and of values. Sums of large values over a row overflow float32 unless
#: they are divided by the row's sum first; the scale of tiny ones may have no reciprocal.
SIZES = (
    *((size, 1.0) for size in (1e-30, 1e-18, 1e-6, 1e-3, 1.0, 30.0, 700.0, 1e4)),
    *((700.0, size) for size in (1e37, 1e-37)),
)


@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False)])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(("size", "of_values"), SIZES)
def test_as_float64_says(
    device: str,
    size: float,
    of_values: float,
    precision: Precision,
    head_dim: int,
    is_causal: bool,
) -> None:
    """131 and 200 tokens: ragged blocks, which masked scores were NaN in."""
    generator = torch.Generator().manual_seed(head_dim)
    shape = (1, 2, 131 if is_causal else 200, head_dim)
    q, v = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    q = (size * q).bfloat16()
    v = (v if of_values == 1 else of_values * (1 + v / 8)).bfloat16()
    # Rounding errors of tiny logits are alike.
    data = "noise" if 1e-3 <= size <= 30 else "tiny"
    options: dict[str, Any] = {"is_causal": is_causal, "output_dtype": torch.float32}
    options["return_lse"] = True
    policy = SparsePolicy(topk=1.0, precision=precision)
    assert not run(Case(0, "attention", data, q, q, v, policy, "HND", options)).faults
