# SPDX-License-Identifier: Apache-2.0
"""NaN in partial results, and in orders whose grid is cut; tests/fuzz has whole calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparge import Precision, SparsePolicy, TokenGrid, attention, attention_partials, grid_order

GRID = TokenGrid(4, 9, 14, suffix=30)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", Precision)
def test_partial_results_of_the_heads_that_read_a_nan_are_nan(
    precision, device, make_qkv, one_thread
) -> None:
    q, k, v = make_qkv(2, 4, 300, 64, kv_heads=2, device=device)
    k[1, 1, 250, 5] = math.nan
    parts = attention_partials(q, k, v, SparsePolicy(topk=0.15, precision=precision))
    assert parts.row_sum[1, 2:].isnan().all() and parts.out_sum[1, 2:].isnan().all()
    assert parts.row_sum[0].isfinite().all() and parts.row_sum[1, :2].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", Precision)
def test_key_lengths_that_cut_the_grid_of_an_order_give_nan(precision, make_qkv) -> None:
    """The host cannot see it without waiting; on a CPU it raises."""
    lengths = torch.tensor([GRID.tokens, 150], dtype=torch.int32, device="cuda")
    policy = SparsePolicy(topk=0.5, precision=precision)
    q, k, v = make_qkv(2, 4, GRID.tokens, 64, kv_heads=2, device="cuda")
    out: Any = attention(q, k, v, policy, order=grid_order(GRID).on("cuda"), key_lengths=lengths)
    assert out[0].isfinite().all() and out[1].isnan().any(-1).all()
