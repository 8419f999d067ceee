# SPDX-License-Identifier: Apache-2.0
"""Many calls: the same bits each time, and nothing that grows."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sparge
from sparge import HeadBudget, Router, SparsePolicy, TokenGrid, grid_order

pytestmark = pytest.mark.gpu

REPEATS = 200
CALLS, SETTLED = 10_000, 1_000
#: A kilobyte a call would be 10 MB.
HOST_KIB = 8 * 1024
HALF = SparsePolicy(topk=0.5, pvthreshd=15.0)


def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("measured", [False, True])
def test_repeats_are_bit_identical(
    head_dim: int, measured: bool, generator: torch.Generator
) -> None:
    """measured: cube order, and budgets that pool the dropped blocks of every head."""
    grid = TokenGrid(6, 20, 30, suffix=100)
    q, k, v = (draw((1, 8, grid.tokens, head_dim), generator) for _ in range(3))
    order = grid_order(grid) if measured else None
    budget = HeadBudget.uniform(8, 0.3, 0.5, Router.ERROR, "cuda") if measured else None

    def attend() -> Tensor:
        return sparge.attention(q, k, v, HALF, order=order, budget=budget)

    first = attend()
    assert all(torch.equal(first, attend()) for _ in range(REPEATS))


def calls(generator: torch.Generator) -> list[Callable[[], Tensor]]:
    """Shapes that have little in common."""

    def call(heads: int, kv_heads: int, queries: int, keys: int, head_dim: int, causal: bool):
        q = draw((1, heads, queries, head_dim), generator)
        k, v = (draw((1, kv_heads, keys, head_dim), generator) for _ in range(2))
        return lambda: sparge.attention(q, k, v, HALF, is_causal=causal)

    return [
        call(1, 1, 1, 1, 64, False),
        call(8, 2, 799, 1_500, 128, False),
        call(4, 4, 2_048, 2_048, 64, True),
        call(6, 3, 129, 63, 40, False),
        call(3, 1, 4_444, 4_444, 96, True),
        call(12, 12, 3_001, 640, 128, False),
        call(2, 2, 127, 8_000, 64, False),
    ]


def test_ten_thousand_calls_leak_nothing(generator: torch.Generator) -> None:
    todo = calls(generator)
    first = [call() for call in todo]
    for index in range(SETTLED):
        todo[index % len(todo)]()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    host_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(CALLS):
        todo[index % len(todo)]()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host_kib < HOST_KIB
    assert all(torch.equal(call(), once) for call, once in zip(todo, first, strict=True))
