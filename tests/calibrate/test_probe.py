# SPDX-License-Identifier: Apache-2.0
"""Probed errors against those of all rows, and what drift does to a budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparge import HeadBudget, SparsePolicy, TokenGrid, attention, cube_order
from sparge.calibrate import Probe, Workload
from sparge.metrics import rel_l2

GRID = TokenGrid(4, 8, 15, prefix=20)
HEADS = 3


@pytest.fixture
def qkv(make_qkv) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(2, HEADS, GRID.tokens, 32, kv_heads=1)


@pytest.fixture
def workload() -> Workload:
    return Workload(cube_order(GRID))


def probed(workload: Workload, layers: int = 1) -> Probe:
    return Probe.begin(layers=layers, heads=HEADS, workload=workload, device="cpu")


def sparse(qkv: tuple[Tensor, Tensor, Tensor], density: float) -> Tensor:
    budget = HeadBudget.uniform(HEADS, density)
    out = attention(*qkv, SparsePolicy(), order=cube_order(GRID), budget=budget)
    assert isinstance(out, Tensor)
    return out


def exact(qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*qkv, enable_gqa=True)


def test_errors_are_those_of_the_rows_that_may_drop_something(qkv, workload) -> None:
    probe = probed(workload)
    out = sparse(qkv, 0.3)
    probe.sample(0, *qkv, out=out)  # three query blocks: all of them
    block = workload.order.token_slot.long() // 128
    rows = torch.isin(block, torch.tensor(workload.sparse_query_blocks()))
    for head, error in enumerate(probe.relative_errors()[0]):
        expected = rel_l2(out[:, head, rows], exact(qkv)[:, head, rows])
        assert float(error) == pytest.approx(expected, rel=1e-3)
    assert float(probe.relative_errors().min()) > 0.1


def test_exact_attention_has_no_error_and_nothing_probed_has_no_number(qkv, workload) -> None:
    probe = probed(workload, layers=2)
    probe.sample(1, *qkv, out=exact(qkv))
    errors = probe.relative_errors()
    assert errors[0].isnan().all()
    assert float(errors[1].max()) < 1e-3


def test_the_scale_counts(qkv, workload) -> None:
    probe = probed(workload)
    scaled = torch.nn.functional.scaled_dot_product_attention(*qkv, enable_gqa=True, scale=0.5)
    probe.sample(0, *qkv, out=scaled, scale=0.5)
    assert float(probe.relative_errors().max()) < 1e-3


def test_only_heads_that_drifted_get_denser(qkv, workload) -> None:
    probe = probed(workload)
    out = exact(qkv).clone()
    out[:, 1] *= 1.2
    out[:, 2] *= 1.1
    budget = HeadBudget.uniform(HEADS, 0.4)
    table = budget.table(SparsePolicy())
    probe.sample(0, *qkv, out=out)
    probe.tighten(0, budget, target=0.1)  # 0.2 is past 1.5 times of it, 0.1 is not
    assert budget.density.tolist() == pytest.approx([0.4, 0.6, 0.4])
    assert table[:, 0].tolist() == pytest.approx([0.4, 0.6, 0.4]), "what kernels read"
    probe.tighten(0, budget, target=0.1)
    assert budget.density.tolist() == pytest.approx([0.4, 0.6, 0.4]), "counts afresh"
    for _ in range(5):
        probe.sample(0, *qkv, out=out)
        probe.tighten(0, budget, target=0.1)
    assert budget.density.tolist() == pytest.approx([0.4, 1.0, 0.4]), "up to everything"
    assert probe.relative_errors()[0].tolist() == pytest.approx([0, 0.2, 0.1], abs=5e-3)


def test_other_blocks_in_every_sample(qkv) -> None:
    grid = TokenGrid(16, 16, 16)
    probe = Probe.begin(layers=1, heads=1, workload=Workload(cube_order(grid)), device="cpu")
    q = torch.randn(1, 1, grid.tokens, 16)
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    half = out.clone()
    half[:, :, : grid.tokens // 2] *= 2  # off by its norm, in half of the rows
    for _ in range(4):
        probe.sample(0, q, q, q, half)
    assert probe.samples == [32], "all 32 query blocks, each once"
    expected = rel_l2(half, out)
    assert float(probe.relative_errors()) == pytest.approx(expected, rel=1e-3)
