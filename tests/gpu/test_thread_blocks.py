# SPDX-License-Identifier: Apache-2.0
"""Results do not hang on how work is cut: into runs of quantize, rows of route, and the Hopper
kernels' persistent blocks.

With few persistent blocks each serves many work items one after another: long and short lists,
empty ones, the filter's counters. A GPU with more SMs than the small cases have items never gets
that far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge import AttentionStats, SparsePolicy, attention
from sparge.kernels import Element, Kernel, KernelSpec, capabilities, get_kernel
from sparge.stages import launches, prepared, quantize_grid
from sparge.stages.quantize_grid import QuantizeGrid
from sparge.stages.workspace import CallShape
from tests.gpu.cases import CASES, Case, lengths_of, make_qkv, some_cases
from tests.gpu.conftest import (
    HOPPER,
    Kernels,
    Workspace,
    every_element,
    spec_of,
    with_element,
    workspaces,
)
from tests.gpu.test_head_settings import JOBS, Job, drawn

pytestmark = pytest.mark.gpu
hopper_kernels = pytest.mark.parametrize("kernels", HOPPER, ids=lambda kernels: kernels.id)

#: Key blocks in a run: each alone, runs that leave a rest, all in one.
RUNS = (1, 6, 2048)
POLICIES = {
    "dense": SparsePolicy(topk=1.0),
    "cdf and filter": SparsePolicy(select_by="cdf", cdfthreshd=0.9, pvthreshd=6.0),
}


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody writes is alike in all calls."""
    empty = torch.empty

    def full(*size: Any, **options: Any) -> Tensor:
        found = empty(*size, **options)
        return found.fill_(torch.nan if found.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", full)


def workspace_of(call: Callable[[], object]) -> Workspace:
    with workspaces() as found:
        call()
    (workspace,) = found
    return workspace


def assert_alike(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """The call leaves the same workspace in all RUNS."""
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
        found.append(workspace_of(call).memory)
    assert tuple(runs) == RUNS
    assert all(torch.equal(memory, found[0]) for memory in found)


@pytest.mark.parametrize("policy", [SparsePolicy(), POLICIES["dense"]], ids=["all", "no queries"])
@every_element
@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_runs_without_budgets(
    case: Case, element, policy: SparsePolicy, generator, monkeypatch, force, filled
) -> None:
    kernels = Kernels(element).of_dtype(case.dtype)
    force(kernels)
    q, k, v = make_qkv(case, generator)
    policy, lengths = with_element(policy, kernels.element), lengths_of(case)
    assert_alike(monkeypatch, lambda: attention(q, k, v, policy, key_lengths=lengths))


@every_element
@pytest.mark.parametrize("job", JOBS[::2], ids=lambda job: job.case.id)
def test_runs_with_budgets_and_orders(
    job: Job, element, generator, force, monkeypatch, filled
) -> None:
    kernels = Kernels(element).of_dtype(job.case.dtype)
    force(kernels)
    assert_alike(monkeypatch, drawn(job, kernels.element, generator).attend)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("job", JOBS[::3], ids=lambda job: job.case.id)
def test_query_blocks_choose_alone(job, rows: int, generator, poison, force, monkeypatch) -> None:
    """However many share a thread block: of long sequences the scores of fewer fit in it."""
    kernels = Kernels(Element.BF16).of_dtype(job.case.dtype)
    force(kernels)
    call = drawn(job, kernels.element, generator)

    def routed() -> tuple[Tensor, ...]:
        stats = AttentionStats("cuda")
        workspace = workspace_of(lambda: call.attend(stats=stats))
        return workspace.fields()["block_map"], stats.counters

    expected = routed()
    head_dim = CallShape.of(call.q, call.k).head_dim
    kernel = get_kernel(KernelSpec("route", capabilities("cuda").arch, head_dim), 0)
    monkeypatch.setattr(kernel.sizes, "rows", rows)
    assert all(map(torch.equal, routed(), expected))


@hopper_kernels
@pytest.mark.parametrize("empty_rows", [False, True], ids=["routed", "empty-rows"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@some_cases
def test_the_number_of_persistent_blocks_changes_nothing(
    case: Case, policy: SparsePolicy, empty_rows: bool, kernels: Kernels,
    generator, poison, force, monkeypatch,
) -> None:  # fmt: skip
    force(kernels)
    policy = with_element(policy, kernels.element)
    q, k, v = make_qkv(case, generator)
    causal = "top-left" if case.causal else None
    options = {"causal": causal, "key_lengths": lengths_of(case), "block_mask": None}
    if empty_rows:
        blocks = (-(-q.shape[2] // 128), -(-k.shape[2] // 64))
        mask = torch.rand(*q.shape[:2], *blocks, generator=generator).cuda() < 0.5
        mask[:, :, ::3] = False
        options["block_mask"] = mask

    def call() -> tuple[Tensor, Tensor, Tensor]:
        stats = AttentionStats("cuda")
        out, lse = attention(q, k, v, policy, return_lse=True, stats=stats, **options)
        return out, lse, stats.counters

    many = call()
    for blocks in (1, 3):
        prepared._kept.clear()
        monkeypatch.setattr(launches, "multiprocessors", lambda _, blocks=blocks: blocks)
        assert all(map(torch.equal, many, call()))


@hopper_kernels
def test_attend_leaves_the_workspace_as_it_was(
    kernels: Kernels, generator, force, monkeypatch, filled
) -> None:
    """So it may run twice on one, or not at all."""
    force(kernels)
    q, k, v = make_qkv(CASES[0], generator)
    policy = with_element(SparsePolicy(topk=0.5), kernels.element)
    launch, outs = Kernel.launch, []

    def after_attends(count: int) -> Workspace:
        def repeated(kernel: Kernel, *given: Any) -> None:
            for _ in range(count if spec_of(kernel).entry == kernels.entry else 1):
                launch(kernel, *given)

        monkeypatch.setattr(Kernel, "launch", repeated)
        return workspace_of(lambda: outs.append(attention(q, k, v, policy)))

    found = [after_attends(count) for count in (0, 1, 2)]
    assert torch.equal(outs[1], outs[2])
    assert all(torch.equal(workspace.memory, found[0].memory) for workspace in found)
    assert int(found[2].fields()["next_item"]) == 0
