# SPDX-License-Identifier: Apache-2.0
"""Many calls: the same bits each time, and nothing that grows."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from sparge import HeadSettings, Precision, Router, TokenGrid, grid_order
from sparge.order import grid as grids
from sparge.order.variants import VARIANTS
from sparge.session import Aim, Session, TokenLayout
from tests.gpu.cases import SOME_CASES, lengths_of
from tests.gpu.cases import make_qkv as case_qkv
from tests.gpu.conftest import HALF
from tests.gpu.test_head_settings import JOBS, PLAIN, settings_of, with_orders

pytestmark = pytest.mark.gpu

attention: Any = sparge.attention
REPEATS = 200
CALLS, SETTLED = 10_000, 1_000
#: A kilobyte a call would be 10 MB.
HOST_KIB = 8 * 1024
#: What torch's cache asks of the GPU at once for tensors of 1 to 10 MB: one more is no growth.
SEGMENT = 20 << 20

LAYERS, HEADS = 2, 4
#: In all variants a quarter more orders than are kept.
GRIDS = [TokenGrid(4 + n % 4, 10 + n // 4, 13, prefix=20 * (n % 3)) for n in range(40)]
HEAD_DIMS = [(64, 128)[n % 2] for n in range(len(GRIDS))]
SETTLED_ROUNDS, ROUNDS = 2, 3


def host_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.SIXTEEN_BIT])
def test_repeats_are_bit_identical(precision, head_dim, measured: bool, make_qkv) -> None:
    """measured: cube order, and budgets that pool the dropped blocks of every head."""
    grid = TokenGrid(6, 20, 30, suffix=100)
    qkv = make_qkv(1, 8, grid.tokens, head_dim, device="cuda")
    policy = replace(HALF, precision=precision)
    named = {}
    if measured:
        settings = HeadSettings.uniform(8, 0.3, 0.5, Router.ERROR, "cuda")
        named = {"order": grid_order(grid), "head_settings": settings}
    first = attention(*qkv, policy, **named)
    for _ in range(REPEATS):
        assert torch.equal(first, attention(*qkv, policy, **named))


def calls(generator: torch.Generator) -> list[Callable[[], Any]]:
    """Shapes that have little in common; two in token orders, with a residual and a text."""
    found = []
    for case in SOME_CASES:
        options = {"causal": "top-left" if case.causal else None, "key_lengths": lengths_of(case)}
        found.append(partial(attention, *case_qkv(case, generator), HALF, **options))
    for job in JOBS[:3:2]:
        assert job.grid is not None
        order, settings = grid_order(job.grid).on("cuda"), with_orders(settings_of(HEADS))
        options = {"order": order, "head_settings": settings}
        found.append(partial(attention, *case_qkv(job.case, generator), PLAIN, **options))
    return found


def sampling_run(grid: TokenGrid, inputs: tuple[Tensor, ...], head_dim: int) -> list[Tensor]:
    """Work that a run over one grid makes the library do: dense calls that are measured, a choice,
    sparse calls in all variants.

    Returns the outputs that do not hang on the choice.
    """
    q, k, v = (x[:, :, : grid.tokens, :head_dim] for x in inputs)
    device = q.device
    steps = 1 + VARIANTS
    session = Session.of(Aim("budget", 0.4), steps=steps, dense_steps=1, even_if_slower=True)
    for step in range(steps):
        running = session.begin_step(step, TokenLayout.of(LAYERS, grid), device)
        for layer in range(LAYERS):
            running.attend(layer, q, k, v)
        running.end()
    assert session.counts.sparse
    fixed, outs = with_orders(settings_of(HEADS)), []
    for variant in range(VARIANTS):
        order = grid_order(grid, variant).on(device)
        outs.append(attention(q, k, v, PLAIN, order=order, head_settings=fixed))
    return outs


def test_ten_thousand_calls_leak_nothing(generator: torch.Generator) -> None:
    todo = calls(generator)
    first = [call() for call in todo]

    def run(count: int) -> tuple[int, int]:
        for index in range(count):
            todo[index % len(todo)]()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    before, host_before = run(SETTLED), host_kib()
    assert run(CALLS) == before
    assert host_kib() - host_before < HOST_KIB
    assert all(torch.equal(call(), once) for call, once in zip(todo, first, strict=True))


def test_runs_over_many_grids_leak_nothing(make_qkv) -> None:
    """There are more orders than are kept, each with its copy on the GPU: what goes takes its copy
    along."""
    most = max(grid.tokens for grid in GRIDS)
    inputs = make_qkv(1, HEADS, most, 128, device="cuda")
    kept_orders = grids._order_of_kinds

    def rounds(count: int) -> None:
        for _ in range(count):
            for grid, head_dim in zip(GRIDS, HEAD_DIMS, strict=True):
                sampling_run(grid, inputs, head_dim)

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def outputs() -> list[Tensor]:
        """Of one grid in each head_dim."""
        runs = (sampling_run(GRIDS[n], inputs, HEAD_DIMS[n]) for n in range(2))
        return [out for outs in runs for out in outs]

    first = outputs()
    kept_orders.cache_clear()
    without_orders = held()
    rounds(SETTLED_ROUNDS)
    before, reserved, host_before = held(), torch.cuda.memory_reserved(), host_kib()
    rounds(ROUNDS)
    assert held() == before > without_orders
    assert torch.cuda.memory_reserved() <= reserved + SEGMENT
    assert host_kib() - host_before < HOST_KIB
    orders = kept_orders.cache_info()
    assert orders.maxsize == orders.currsize < len(GRIDS) * VARIANTS
    none_kept = (SETTLED_ROUNDS + ROUNDS) * len(GRIDS) * VARIANTS
    assert orders.misses == none_kept, "none was kept so long"
    assert all(map(torch.equal, first, outputs()))
    kept_orders.cache_clear()
    assert held() == without_orders
