# SPDX-License-Identifier: Apache-2.0
"""Measuring on the kernels finds what measurement on the reference finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparge import SparsePolicy, TokenGrid, attention, grid_order
from sparge.stages.score import MOST_DENSITIES
from sparge.tune import (
    BLOCKS_A_CALL,
    CandidateSet,
    Measurement,
    Workload,
    kernel_measure,
    measure_for,
    reference_measure,
)
from sparge.tune.measure import Measure
from tests.gpu.cases import Case, make_qkv
from tests.gpu.conftest import no_waits

pytestmark = pytest.mark.gpu


def begun(
    grid: TokenGrid,
    heads: int,
    measure: Measure = kernel_measure,
    device: str = "cuda",
    candidates: CandidateSet | None = None,
) -> Measurement:
    """Empty measurement of one layer."""
    workload = Workload(grid_order(grid))
    return Measurement.begin(
        layers=1,
        heads=heads,
        workload=workload,
        candidates=candidates,
        measure=measure,
        device=device,
    )


@pytest.mark.parametrize(
    ("grid", "case", "candidates"),
    [
        (TokenGrid(7, 12, 15, prefix=70), Case("cubes and text", heads=4), None),
        (
            TokenGrid(5, 14, 13, suffix=45),
            Case("text last", heads=3, kv_heads=3, head_dim=64, layout="NHD", batch=2),
            None,
        ),
        (
            TokenGrid(3, 12, 15),
            Case("most densities", heads=2, head_dim=64),
            CandidateSet(tuple((1 + n) / MOST_DENSITIES for n in range(MOST_DENSITIES))),
        ),
    ],
    ids=["cubes and text", "text last, NHD, 64", "most densities"],
)
def test_errors_are_those_of_the_reference(
    grid: TokenGrid, case: Case, candidates: CandidateSet | None, generator
) -> None:
    qkv = make_qkv(replace(case, queries=grid.tokens, keys=grid.tokens), generator)

    def errors(measure: Measure, device: str) -> np.ndarray:
        measurement = begun(grid, case.heads, measure, device, candidates)
        measurement.add(0, *(x.to(device) for x in qkv))
        return measurement.fetched.errors_and_scales()[0]

    by_kernels = errors(kernel_measure, "cuda")
    # On the CPU: compute-sanitizer slows each of thousands of torch kernels down.
    by_reference = errors(reference_measure, "cpu")
    assert np.isfinite(by_kernels).all()
    # Rounded P and V differ (E4M3 or FP16), which both count against a dense output rounded alike.
    difference = np.abs(by_kernels - by_reference)
    assert (difference <= 0.05 * by_reference + 0.01).all()
    assert by_kernels[..., 0, :].max() > 0.1, "the least dense candidates drop something"


def test_sampling_waits_for_nothing(make_qkv) -> None:
    assert measure_for("cuda") is kernel_measure
    grid = TokenGrid(9, 12, 12)  # more query blocks than a sample takes
    qkv = make_qkv(1, 4, grid.tokens, 128, device="cuda")
    measurement = begun(grid, 4)
    measurement.add(0, *qkv)
    torch.cuda.synchronize()
    measurement.blocks_measured[0] = 0  # so that token orders are chosen again
    with no_waits():
        measurement.add(0, *qkv)
        measurement.add(0, *qkv)
    assert measurement.blocks_measured == [2 * BLOCKS_A_CALL]


def test_a_measurement_takes_no_more_memory_than_a_sparse_call(make_qkv) -> None:
    grid = TokenGrid(13, 30, 45, prefix=226)
    q, k, v = make_qkv(1, 24, grid.tokens, 128, device="cuda")
    measurement = begun(grid, 24)

    def peak(call: Callable[[], object]) -> int:
        call()  # what the libraries keep
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before

    order = grid_order(grid).on(torch.device("cuda"))
    sparse = peak(lambda: attention(q, k, v, SparsePolicy(topk=0.2), order=order))
    assert peak(lambda: measurement.add(0, q, k, v)) <= sparse
