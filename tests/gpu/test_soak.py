# SPDX-License-Identifier: Apache-2.0
"""Many calls: the same bits each time, and nothing that grows."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import sparge
from sparge import HeadSettings, Precision, Router, SparsePolicy, TokenGrid, grid_order
from sparge.order import grid as grids
from sparge.order.variants import VARIANTS
from sparge.tune import Measurement, Probe, Workload, measure_for
from tests.gpu.test_head_settings import PLAIN, budget_of
from tests.gpu.test_order_kinds import HEAD_WALK

pytestmark = pytest.mark.gpu

REPEATS = 200
CALLS, SETTLED = 10_000, 1_000
#: A kilobyte a call would be 10 MB.
HOST_KIB = 8 * 1024
#: What torch's cache asks of the GPU at once for tensors of 1 to 10 MB: one more is no growth.
SEGMENT = 20 << 20
HALF = SparsePolicy(topk=0.5, pvthreshd=15.0)

LAYERS, HEADS = 2, 4
#: In all variants a quarter more orders than are kept.
GRIDS = [TokenGrid(4 + n % 4, 10 + n // 4, 13, prefix=20 * (n % 3)) for n in range(40)]
SETTLED_ROUNDS, ROUNDS = 2, 3


def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.SIXTEEN_BIT])
def test_repeats_are_bit_identical(
    precision: Precision, head_dim: int, measured: bool, generator: torch.Generator
) -> None:
    """measured: cube order, and budgets that pool the dropped blocks of every head."""
    grid = TokenGrid(6, 20, 30, suffix=100)
    q, k, v = (draw((1, 8, grid.tokens, head_dim), generator) for _ in range(3))
    order = grid_order(grid) if measured else None
    head_settings = HeadSettings.uniform(8, 0.3, 0.5, Router.ERROR, "cuda") if measured else None

    policy = replace(HALF, precision=precision)

    def attend() -> Tensor:
        return sparge.attention(q, k, v, policy, order=order, head_settings=head_settings)

    first = attend()
    assert all(torch.equal(first, attend()) for _ in range(REPEATS))


def calls(generator: torch.Generator) -> list[Callable[[], Tensor]]:
    """Shapes that have little in common; two in token orders, with a residual and a text."""

    def call(heads: int, kv_heads: int, queries: int, keys: int, head_dim: int, causal: bool):
        q = draw((1, heads, queries, head_dim), generator)
        k, v = (draw((1, kv_heads, keys, head_dim), generator) for _ in range(2))
        return lambda: sparge.attention(q, k, v, HALF, is_causal=causal)

    def measured(grid: TokenGrid, head_dim: int):
        q, k, v = (draw((1, HEADS, grid.tokens, head_dim), generator) for _ in range(3))
        order, head_settings = grid_order(grid).on("cuda"), each_its_own("cuda")
        return lambda: sparge.attention(q, k, v, PLAIN, order=order, head_settings=head_settings)

    return [
        measured(TokenGrid(5, 9, 11, prefix=70), 128),
        measured(TokenGrid(3, 12, 20, suffix=33), 64),
        call(1, 1, 1, 1, 64, False),
        call(8, 2, 799, 1_500, 128, False),
        call(4, 4, 2_048, 2_048, 64, True),
        call(6, 3, 129, 63, 40, False),
        call(3, 1, 4_444, 4_444, 96, True),
        call(12, 12, 3_001, 640, 128, False),
        call(2, 2, 127, 8_000, 64, False),
    ]


def each_its_own(device: torch.device | str) -> HeadSettings:
    """Densities, pool weights, routers and token orders that differ from head to head."""
    order_kind = torch.tensor(HEAD_WALK, dtype=torch.int32, device=device)
    return replace(budget_of(HEADS).on(device), order_kind=order_kind)


def sampling_run(grid: TokenGrid, inputs: list[Tensor], head_dim: int) -> list[Tensor]:
    """Work that a run over one grid makes the library do: dense calls that are measured, a choice,
    sparse calls in all variants that are probed.

    Returns the outputs that do not hang on the choice.
    """
    q, k, v = (x[:, :, : grid.tokens, :head_dim] for x in inputs)
    workload, device = Workload(grid_order(grid)), q.device
    measurement = Measurement.begin(
        layers=LAYERS,
        heads=HEADS,
        workload=workload,
        measure=measure_for(device),
        device=device,
    )
    for layer in range(LAYERS):
        measurement.add(layer, q, k, v)
    choices = measurement.error_table().choose(mean_density=0.4)
    probe = Probe.begin(layers=LAYERS, heads=HEADS, workload=workload, device=device)
    fixed, outs = each_its_own(device), []
    for variant in range(VARIANTS):
        order = grid_order(grid, variant).on(device)
        for layer, head_settings in enumerate(choices.of_layers(device, PLAIN)):
            out = sparge.attention(q, k, v, PLAIN, order=order, head_settings=head_settings)
            probe.compare(layer, q, k, v, out, number=variant)
        outs.append(sparge.attention(q, k, v, PLAIN, order=order, head_settings=fixed))
    assert probe.relative_errors().isfinite().all()
    return outs


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


def test_runs_over_many_grids_leak_nothing(generator: torch.Generator) -> None:
    """There are more orders than are kept, each with its copy on the GPU: what goes takes its copy
    along."""
    most = max(grid.tokens for grid in GRIDS)
    inputs = [draw((1, HEADS, most, 128), generator) for _ in range(3)]
    kept_orders = grids._order_of_kinds

    def rounds(count: int) -> None:
        for _ in range(count):
            for index, grid in enumerate(GRIDS):
                sampling_run(grid, inputs, (64, 128)[index % 2])

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    first = [
        sampling_run(grid, inputs, head_dim)
        for grid, head_dim in zip(GRIDS, (64, 128), strict=False)
    ]
    kept_orders.cache_clear()
    without_orders = held()
    rounds(SETTLED_ROUNDS)
    before, reserved = held(), torch.cuda.memory_reserved()
    host_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rounds(ROUNDS)
    assert held() == before > without_orders
    assert torch.cuda.memory_reserved() <= reserved + SEGMENT
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host_kib < HOST_KIB
    orders = kept_orders.cache_info()
    assert orders.maxsize == orders.currsize < len(GRIDS) * VARIANTS
    assert orders.misses == (SETTLED_ROUNDS + ROUNDS) * len(GRIDS) * VARIANTS, (
        "none was kept so long"
    )
    again = [
        sampling_run(grid, inputs, head_dim)
        for grid, head_dim in zip(GRIDS, (64, 128), strict=False)
    ]
    for outs, others in zip(first, again, strict=True):
        assert all(torch.equal(out, other) for out, other in zip(outs, others, strict=True))
    del again, outs, others
    kept_orders.cache_clear()
    assert held() == without_orders
