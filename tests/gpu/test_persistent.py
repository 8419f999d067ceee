# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels' persistent blocks: how many there are changes nothing.

With few blocks each serves many work items one after another: long and short lists, empty ones, the
filter's counters. A GPU with more SMs than the small cases have items never gets that far.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from sparge import SparsePolicy
from sparge.attention import attention
from sparge.call import make_call
from sparge.order.facts import NO_ORDER
from sparge.stages import ops
from sparge.stages.pipeline import quantize, route
from sparge.stages.rules import AttendRules
from sparge.stages.workspace import WorkspaceLayout
from sparge.stats import AttentionStats
from tests.gpu.cases import CASES, Case, lengths_of, make_qkv, some_cases
from tests.gpu.conftest import HOPPER, Kernels, with_element

pytestmark = pytest.mark.gpu
hopper_kernels = pytest.mark.parametrize("kernels", HOPPER, ids=lambda kernels: kernels.id)

POLICIES = {
    "dense": SparsePolicy(topk=1.0),
    "cdf and filter": SparsePolicy(select_by="cdf", cdfthreshd=0.9, pvthreshd=6.0),
}


@hopper_kernels
@pytest.mark.parametrize("empty_rows", [False, True], ids=["routed", "empty-rows"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@some_cases
def test_the_number_of_blocks_changes_nothing(
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

    def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    call = make_call(q, k, v, policy, "HND", False, None, None, None, None)
    element, sizes = int(call.element), call.shape.sizes()
    workspace = quantize(call)
    block_map, _ = route(call, workspace, None)
    before = workspace.cpu()  # on the host: a kernel that compares would read the gaps too
    outs = [torch.empty_like(q) for _ in range(2)]
    rules = AttendRules(True, False, call.scale, 50.0, pv_filter=False, causal=False)
    given = (*rules.flat(), None, None, NO_ORDER.flat())
    for out in outs:
        ops.attend(q, workspace, block_map, sizes, element, *given, out, *[None] * 5)
    assert torch.equal(*outs)
    assert torch.equal(workspace.cpu(), before)
    layout = WorkspaceLayout(call.shape, call.element, with_values=True, with_queries=True)
    assert int(layout.view(workspace, "next_item")) == 0
