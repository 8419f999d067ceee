# SPDX-License-Identifier: Apache-2.0
"""Results do not hang on how work is cut: into runs of quantize, rows of route, and the Hopper
kernels' persistent blocks.

With few persistent blocks each serves many work items one after another: long and short lists,
empty ones, the filter's counters. A GPU with more SMs than the small cases have items never gets
that far.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge import AttentionStats, SparsePolicy, attention
from sparge.call import make_call
from sparge.kernels import Element
from sparge.stages import ops, quantize_grid
from sparge.stages.launch import find_kernel, quantize
from sparge.stages.pipeline import quantize as quantize_call
from sparge.stages.pipeline import route
from sparge.stages.quantize_grid import QuantizeGrid
from sparge.stages.rules import NO_ORDER, AttendRules, QuantizeRules
from sparge.stages.workspace import WorkspaceLayout
from tests.gpu.cases import CASES, Case, lengths_of, make_qkv, some_cases
from tests.gpu.conftest import HOPPER, Kernels, every_element, with_element
from tests.gpu.test_head_settings import JOBS, Job, prepare

pytestmark = pytest.mark.gpu
hopper_kernels = pytest.mark.parametrize("kernels", HOPPER, ids=lambda kernels: kernels.id)

#: Key blocks in a run: each alone, runs that leave a rest, all in one.
RUNS = (1, 6, 2048)
POLICIES = {
    "dense": SparsePolicy(topk=1.0),
    "cdf and filter": SparsePolicy(select_by="cdf", cdfthreshd=0.9, pvthreshd=6.0),
}


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


@pytest.mark.parametrize("with_queries", [True, False], ids=["all", "no queries"])
@every_element
@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_runs_without_budgets(
    case: Case, element, with_queries: bool, generator, monkeypatch
) -> None:
    element = Kernels(element).of_dtype(case.dtype).element
    q, k, v = make_qkv(case, generator)
    lengths = lengths_of(case)
    rules = QuantizeRules(with_queries=with_queries)
    assert_alike(monkeypatch, lambda: quantize(q, k, v, lengths, element, rules))


@every_element
@pytest.mark.parametrize("job", JOBS[::2], ids=lambda job: job.case.id)
def test_runs_with_budgets_and_orders(job: Job, element, generator, force, monkeypatch) -> None:
    kernels = Kernels(element).of_dtype(job.case.dtype)
    force(kernels)
    call = prepare(job, kernels.element, generator).call
    assert_alike(monkeypatch, lambda: quantize_call(call))


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("job", JOBS[::3], ids=lambda job: job.case.id)
def test_query_blocks_choose_alone(job, rows: int, generator, poison, force, monkeypatch) -> None:
    """However many share a thread block: of long sequences the scores of fewer fit in it."""
    kernels = Kernels(Element.BF16).of_dtype(job.case.dtype)
    force(kernels)
    call = prepare(job, kernels.element, generator).call
    workspace = quantize_call(call)

    def routed() -> tuple[Tensor, ...]:
        counters = AttentionStats("cuda").counters
        return route(call, workspace, counters), counters

    expected = routed()
    kernel = find_kernel("route", workspace.device, call.shape.head_dim)
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
    launch = importlib.import_module("sparge.stages.launch")
    for blocks in (1, 3):
        monkeypatch.setattr(launch, "resident_blocks", lambda _, blocks=blocks: blocks)
        assert all(map(torch.equal, many, call()))


@hopper_kernels
def test_attend_leaves_the_workspace_as_it_was(kernels: Kernels, generator, force) -> None:
    force(kernels)
    q, k, v = make_qkv(CASES[0], generator)
    policy = with_element(SparsePolicy(topk=0.5), kernels.element)
    call = make_call(q, k, v, policy, "HND", False, None, None, None)
    element, sizes = int(call.element), call.shape.sizes()
    workspace = quantize_call(call)
    block_map = route(call, workspace, None)
    before = workspace.cpu()  # on the host: a kernel that compares would read the gaps too
    outs = [torch.empty_like(q) for _ in range(2)]
    rules = AttendRules(False, call.scale, 50.0, pv_filter=False, causal=False)
    given = (*rules.flat(), None, None, NO_ORDER.flat())
    for out in outs:
        ops.attend(q, workspace, block_map, sizes, element, *given, out, *[None] * 5)
    assert torch.equal(*outs)
    assert torch.equal(workspace.cpu(), before)
    layout = WorkspaceLayout(call.shape, call.element, with_queries=True)
    assert int(layout.view(workspace, "next_item")) == 0
