# SPDX-License-Identifier: Apache-2.0
"""Probed errors against those of all rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparge import HeadSettings, SparsePolicy, TokenGrid, attention, cube_order
from sparge.common.metrics import rel_l2
from sparge.tune import Measurement, Probe, Workload
from sparge.tune.spread import ROW_STEP, spread_rows

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
    head_settings = HeadSettings.uniform(HEADS, density)
    out = attention(*qkv, SparsePolicy(), order=cube_order(GRID), head_settings=head_settings)
    assert isinstance(out, Tensor)
    return out


def exact(qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*qkv, enable_gqa=True)


def compared(slots: Tensor) -> Tensor:
    return torch.isin(slots % 128, torch.tensor(spread_rows(ROW_STEP)))


def test_errors_are_those_of_the_rows_that_may_drop_something(qkv, workload) -> None:
    probe = probed(workload)
    out = sparse(qkv, 0.3)
    probe.compare(0, *qkv, out=out, number=0)  # three query blocks: all of them
    slots = workload.order.token_slot.long()
    sparse_blocks = torch.tensor(workload.sparse_query_blocks())
    rows = torch.isin(slots // 128, sparse_blocks) & compared(slots)
    for head, error in enumerate(probe.relative_errors()[0]):
        expected = rel_l2(out[:, head, rows], exact(qkv)[:, head, rows])
        assert float(error) == pytest.approx(expected, rel=1e-2)
    assert float(probe.relative_errors().min()) > 0.1


def test_exact_attention_has_no_error_and_nothing_probed_has_no_number(qkv, workload) -> None:
    probe = probed(workload, layers=2)
    probe.compare(1, *qkv, out=exact(qkv), number=0)
    errors = probe.relative_errors()
    assert errors[0].isnan().all()
    assert float(errors[1].max()) < 1e-3


def test_the_scale_counts(qkv, workload) -> None:
    probe = probed(workload)
    scaled = torch.nn.functional.scaled_dot_product_attention(*qkv, enable_gqa=True, scale=0.5)
    probe.compare(0, *qkv, out=scaled, number=0, scale=0.5)
    assert float(probe.relative_errors().max()) < 1e-3


def test_batch_entries_are_compared_alike_together_and_apart(make_qkv, workload) -> None:
    qkv = make_qkv(2, HEADS, GRID.tokens, 32)
    out = sparse(qkv, 0.3)
    together, apart = probed(workload), probed(workload)
    together.compare(0, *qkv, out=out, number=2)
    for entry in range(2):
        each = (x[entry : entry + 1] for x in (*qkv, out))
        apart.compare(0, *each, number=2)
    torch.testing.assert_close(together.relative_errors(), apart.relative_errors())


def test_other_blocks_in_every_sample(generator) -> None:
    grid = TokenGrid(16, 16, 16)
    order = cube_order(grid)
    probe = Probe.begin(layers=1, heads=1, workload=Workload(order), device="cpu")
    q = torch.randn(1, 1, grid.tokens, 16, generator=generator)
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    half = out.clone()
    half[:, :, : grid.tokens // 2] *= 2  # off by its norm, in half of the rows
    for number in range(8):
        probe.compare(0, q, q, q, half, number=number)
    assert probe.blocks_probed == [32], "all 32 query blocks, each once"
    rows = compared(order.token_slot.long())
    expected = rel_l2(half[:, :, rows], out[:, :, rows])
    assert float(probe.relative_errors()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("layer", [0, 3])
def test_other_blocks_than_those_that_were_measured(generator, layer: int) -> None:
    """Heads are chosen by the errors of the blocks that measurement saw: those are too good."""
    grid = TokenGrid(16, 16, 16)
    order = cube_order(grid)
    workload = Workload(order)
    measurement = Measurement.begin(layers=4, heads=1, workload=workload)
    seen = torch.tensor(measurement.next_query_blocks(layer, calls=2))  # cond and uncond
    assert len(seen) == 8
    q = torch.randn(1, 1, grid.tokens, 16, generator=generator)
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    rows = torch.isin(order.token_slot // 128, seen)
    off = out.clone()
    off[:, :, rows] *= 2
    probe = Probe.begin(layers=4, heads=1, workload=workload, device="cpu")
    for number in range(2):
        probe.compare(layer, q, q, q, off, number=number)
    assert float(probe.relative_errors()[layer]) < 1e-3
    for number in range(2, 8):
        probe.compare(layer, q, q, q, off, number=number)
    assert float(probe.relative_errors()[layer]) > 0.1, "in the end they come to all"
