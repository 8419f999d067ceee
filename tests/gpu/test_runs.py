# SPDX-License-Identifier: Apache-2.0
"""Quantize gives the same bits however many blocks of a head a thread block takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge import quantize_grid
from sparge.attention import _quantize
from sparge.kernels import Element
from sparge.launch import quantize
from tests.gpu.cases import Case, make_qkv
from tests.gpu.conftest import Kernels
from tests.gpu.test_budgets import JOBS, Job, element_for, prepare
from tests.gpu.test_stages import COPIED_OR_QUANTIZED, ELEMENTS, lengths_of

pytestmark = pytest.mark.gpu

#: Key blocks in a run at most, how few thread blocks a multiprocessor may be left with, and how
#: long an axis of the grid may be: each block alone, runs that leave a rest, all in one.
RUNS = [(1, 32, 65535), (6, 0.01, 3), (2048, 0.0001, 65535)]


def assert_alike(monkeypatch: pytest.MonkeyPatch, quantized: Callable[[], Tensor]) -> None:
    """`quantized` gives the same workspace in all RUNS."""
    empty = torch.empty

    def full(*size: int, **options: Any) -> Tensor:
        found = empty(*size, **options)
        return found.fill_(torch.nan if found.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", full)  # padding, which nobody writes, is alike
    found = []
    for longest, least, axis in RUNS:
        monkeypatch.setattr(quantize_grid, "LONGEST_RUN", longest)
        monkeypatch.setattr(quantize_grid, "LEAST_THREAD_BLOCKS", least)
        monkeypatch.setattr(quantize_grid, "LONGEST_AXIS", axis)
        found.append(quantized())
    for workspace in found[1:]:
        assert torch.equal(workspace, found[0])


@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize(("case", "element"), COPIED_OR_QUANTIZED)
def test_without_budgets(
    case: Case,
    element: Element,
    with_values: bool,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = make_qkv(case, generator)
    values = v if with_values else None
    lengths = lengths_of(case)
    assert_alike(monkeypatch, lambda: quantize(q, k, values, lengths, True, element, True))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.case.id)
def test_with_budgets_and_orders(
    job: Job,
    element: Element,
    generator: torch.Generator,
    force: Callable[[Kernels], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    element = element_for(Kernels(element), job.case)
    force(Kernels(element))
    call = prepare(job, element, generator).call
    assert_alike(monkeypatch, lambda: _quantize(call))
