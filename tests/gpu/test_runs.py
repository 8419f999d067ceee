# SPDX-License-Identifier: Apache-2.0
"""Quantize gives the same bits however many blocks of a head a thread block takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge.kernels import Element
from sparge.stages import quantize_grid
from sparge.stages.launch import quantize
from sparge.stages.pipeline import quantize as quantize_call
from sparge.stages.quantize_grid import QuantizeGrid
from sparge.stages.rules import QuantizeRules
from tests.gpu.cases import CASES, Case, lengths_of, make_qkv
from tests.gpu.conftest import Kernels, every_element
from tests.gpu.test_head_settings import JOBS, Job, prepare

pytestmark = pytest.mark.gpu

#: Key blocks in a run: each alone, runs that leave a rest, all in one.
RUNS = (1, 6, 2048)


def assert_alike(monkeypatch: pytest.MonkeyPatch, quantized: Callable[[], Tensor]) -> None:
    """`quantized` gives the same workspace in all RUNS."""
    empty = torch.empty

    def full(*size: int, **options: Any) -> Tensor:
        found = empty(*size, **options)
        return found.fill_(torch.nan if found.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", full)  # padding, which nobody writes, is alike
    of, runs = QuantizeGrid.of, []

    def noted(*shape: Any, **options: Any) -> QuantizeGrid:
        grid = of(*shape, **options)
        runs.append(grid.key_run)
        return grid

    monkeypatch.setattr(QuantizeGrid, "of", noted)
    monkeypatch.setattr(quantize_grid, "LEAST_THREAD_BLOCKS", 1e-6)
    found = []
    for run in RUNS:
        monkeypatch.setattr(quantize_grid, "LONGEST_RUN", run)
        found.append(quantized())
    assert tuple(runs) == RUNS
    assert all(torch.equal(workspace, found[0]) for workspace in found)


@pytest.mark.parametrize("parts", ["all", "no values", "no queries"])
@every_element
@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_without_budgets(
    case: Case, element: Element, parts: str, generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    element = Kernels(element).of_dtype(case.dtype).element
    q, k, v = make_qkv(case, generator)
    values = None if parts == "no values" else v
    lengths = lengths_of(case)
    rules = QuantizeRules(with_queries=parts != "no queries")
    assert_alike(monkeypatch, lambda: quantize(q, k, values, lengths, element, rules))


@every_element
@pytest.mark.parametrize("job", JOBS[::2], ids=lambda job: job.case.id)
def test_with_budgets_and_orders(
    job: Job, element: Element, generator, force, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels(element).of_dtype(job.case.dtype)
    force(kernels)
    call = prepare(job, kernels.element, generator).call
    assert_alike(monkeypatch, lambda: quantize_call(call))
