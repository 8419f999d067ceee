# SPDX-License-Identifier: Apache-2.0
"""Recorded calls go on reading tables and orders of theirs, however many others come."""

from __future__ import annotations

import pytest
import torch

import sparge
from sparge import HeadSettings, SparsePolicy, TokenGrid, cube_order, grid_order
from sparge.head_settings import KEPT_TABLES
from sparge.order import copies as order_copies

pytestmark = pytest.mark.gpu

GRID = TokenGrid(5, 10, 20)
HEADS = 4


def test_cuda_graph_keeps_its_table_and_its_order(generator: torch.Generator) -> None:
    def draw() -> torch.Tensor:
        drawn = torch.randn(1, HEADS, GRID.tokens, 128, generator=generator)
        return drawn.to("cuda", torch.bfloat16)

    q, k, v = draw(), draw(), draw()
    head_settings, order = HeadSettings.uniform(HEADS, 0.5, device="cuda"), grid_order(GRID)

    def call() -> torch.Tensor:
        out = sparge.attention(q, k, v, SparsePolicy(), order=order, head_settings=head_settings)
        assert isinstance(out, torch.Tensor)
        return out

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    table, copy = head_settings.table(SparsePolicy()), order.on("cuda:0")

    others = [cube_order(TokenGrid(5, 10, 20 + more)) for more in range(4 * order_copies.KEPT)]
    for other in others:
        other.on("cuda:0")
    for index in range(4 * KEPT_TABLES):
        head_settings.table(SparsePolicy(pvthreshd=10.0 + index))
    assert sum(len(other._copies) for other in others) == order_copies.KEPT
    assert len(head_settings._tables) == KEPT_TABLES + 1
    assert head_settings.table(SparsePolicy()) is table and order.on("cuda:0") is copy
    torch.cuda.empty_cache()
    filled = [torch.full((1 << 20,), -1, dtype=torch.int32, device="cuda") for _ in range(64)]

    q.copy_(draw())
    graph.replay()
    assert torch.equal(out, call())
    del filled
