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
from sparge import HeadSettings, Precision, Router, TokenGrid, grid_order
from sparge.order import grid as grids
from sparge.order.variants import VARIANTS
from sparge.tune import Measurement, Probe, Workload, measure_for
from tests.gpu.conftest import HALF
from tests.gpu.test_head_settings import PLAIN, settings_of, with_orders

pytestmark = pytest.mark.gpu

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
def test_repeats_are_bit_identical(
    precision: Precision, head_dim: int, measured: bool, make_qkv
) -> None:
    """measured: cube order, and budgets that pool the dropped blocks of every head."""
    grid = TokenGrid(6, 20, 30, suffix=100)
    qkv = make_qkv(1, 8, grid.tokens, head_dim, device="cuda")
    policy = replace(HALF, precision=precision)
    named = {}
    if measured:
        settings = HeadSettings.uniform(8, 0.3, 0.5, Router.ERROR, "cuda")
        named = {"order": grid_order(grid), "head_settings": settings}
    first = sparge.attention(*qkv, policy, **named)
    for _ in range(REPEATS):
        assert torch.equal(first, sparge.attention(*qkv, policy, **named))


def calls(make_qkv) -> list[Callable[[], Tensor]]:
    """Shapes that have little in common; two in token orders, with a residual and a text."""

    def call(heads: int, kv_heads: int, queries: int, keys: int, head_dim: int, causal: bool):
        of_keys = {"kv_heads": kv_heads, "kv_tokens": keys, "device": "cuda"}
        qkv = make_qkv(1, heads, queries, head_dim, **of_keys)
        return lambda: sparge.attention(*qkv, HALF, is_causal=causal)

    def measured(grid: TokenGrid, head_dim: int):
        qkv = make_qkv(1, HEADS, grid.tokens, head_dim, device="cuda")
        order, head_settings = grid_order(grid).on("cuda"), with_orders(settings_of(HEADS))
        return lambda: sparge.attention(*qkv, PLAIN, order=order, head_settings=head_settings)

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


def sampling_run(grid: TokenGrid, inputs: tuple[Tensor, ...], head_dim: int) -> list[Tensor]:
    """Work that a run over one grid makes the library do: dense calls that are measured, a choice,
    sparse calls in all variants that are probed.

    Returns the outputs that do not hang on the choice.
    """
    q, k, v = (x[:, :, : grid.tokens, :head_dim] for x in inputs)
    device = q.device
    shared = {"layers": LAYERS, "heads": HEADS, "workload": Workload(grid_order(grid))}
    measurement = Measurement.begin(**shared, measure=measure_for(device), device=device)
    for layer in range(LAYERS):
        measurement.add(layer, q, k, v)
    choices = measurement.error_table().choose(mean_density=0.4)
    probe = Probe.begin(**shared, device=device)
    fixed, outs = with_orders(settings_of(HEADS)), []
    for variant in range(VARIANTS):
        order = grid_order(grid, variant).on(device)
        for layer, head_settings in enumerate(choices.of_layers(device, PLAIN)):
            out = sparge.attention(q, k, v, PLAIN, order=order, head_settings=head_settings)
            probe.compare(layer, q, k, v, out, number=variant)
        outs.append(sparge.attention(q, k, v, PLAIN, order=order, head_settings=fixed))
    assert probe.relative_errors().isfinite().all()
    return outs


def test_ten_thousand_calls_leak_nothing(make_qkv) -> None:
    todo = calls(make_qkv)
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
