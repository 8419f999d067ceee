# SPDX-License-Identifier: Apache-2.0
"""Measuring on the kernels finds what measuring in plain torch finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparge import SparsePolicy, TokenGrid, attention, grid_order
from sparge.session.choose import Curves
from sparge.session.heads import BLOCKS
from sparge.session.measure import MeasuredCall, Sums, measure
from sparge.stages.measuring import MOST_DENSITIES
from tests.gpu.cases import Case, make_qkv
from tests.gpu.conftest import no_waits
from tests.session.parts import measured_call

pytestmark = pytest.mark.gpu

MOST = tuple((1 + n) / MOST_DENSITIES for n in range(MOST_DENSITIES))


def errors(call: MeasuredCall) -> Tensor:
    """(heads, orders, pool weights, densities): relative errors of all candidates."""
    found = measure(call)
    return (found.error / found.norm[..., None, None]).sqrt().cpu()


def curves(call: MeasuredCall) -> Curves:
    """Errors beside the output scale that each candidate would get."""
    sums = Sums()
    sums.add(0, measure(call), len(call.query_blocks))
    return Curves.of(sums, call.candidates)


@pytest.mark.parametrize(
    ("grid", "case", "measured"),
    [
        (TokenGrid(7, 12, 15, prefix=70), Case("cubes and text", heads=4), None),
        (
            TokenGrid(5, 14, 13, suffix=45),
            Case("text last", heads=3, kv_heads=3, head_dim=64, layout="NHD", batch=2),
            None,
        ),
        (TokenGrid(3, 12, 15), Case("most densities", heads=2, head_dim=64), MOST),
    ],
    ids=["cubes and text", "text last, NHD, 64", "most densities"],
)
def test_errors_are_those_of_plain_torch(
    grid: TokenGrid, case: Case, measured: tuple[float, ...] | None, generator
) -> None:
    qkv = make_qkv(replace(case, queries=grid.tokens, keys=grid.tokens), generator)
    order = grid_order(grid)
    blocks = (~order.queries_exact).nonzero().flatten().tolist()[:BLOCKS]
    by_kernels = measured_call(qkv, order, blocks)
    # On the CPU: compute-sanitizer slows each of thousands of torch kernels down.
    q, k, v = (x.cpu() for x in qkv)
    by_torch = measured_call((q, k, v), order, blocks)
    if measured is not None:
        by_kernels, by_torch = (
            replace(call, candidates=replace(call.candidates, measured=measured))
            for call in (by_kernels, by_torch)
        )
    pairs = [(errors(by_kernels), errors(by_torch))]
    if measured is None:
        pairs.append((curves(by_kernels).error.cpu(), curves(by_torch).error))
    for found, expected in pairs:
        assert found.isfinite().all()
        # Rounded P and V differ (E4M3 or FP16), which both count against a dense output rounded
        # alike.
        assert ((found - expected).abs() <= 0.05 * expected + 0.01).all()
        assert found[..., 0].max() > 0.1, "the least dense candidates drop something"


def test_measuring_waits_for_nothing(make_qkv) -> None:
    grid = TokenGrid(9, 12, 12)
    call = measured_call(
        make_qkv(1, 4, grid.tokens, 128, device="cuda"), grid_order(grid), range(BLOCKS)
    )
    for _ in range(2):  # the first time kernels are compiled
        curves(call)
    torch.cuda.synchronize()
    with no_waits():
        found = curves(call)
        found.settings(found.chosen([0.4, 0.3]))
        measure(call, with_truth=True)


def test_a_measurement_takes_no_more_memory_than_a_sparse_call(make_qkv) -> None:
    grid = TokenGrid(13, 30, 45, prefix=226)
    q, k, v = make_qkv(1, 24, grid.tokens, 128, device="cuda")
    measured = measured_call((q, k, v), grid_order(grid), range(2, 2 + BLOCKS))

    def peak(call: Callable[[], object]) -> int:
        call()  # what the libraries keep
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before

    order = grid_order(grid).on(torch.device("cuda"))
    sparse = peak(lambda: attention(q, k, v, SparsePolicy(topk=0.2), order=order))
    assert peak(lambda: measure(measured)) <= sparse
