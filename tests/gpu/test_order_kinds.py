# SPDX-License-Identifier: Apache-2.0
"""A walk per head: each head computes, to the bit, what it does where all heads take its walk."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sparge import AttentionStats, TokenGrid, attention, grid_order
from tests.gpu.cases import Case, lengths_of, make_qkv
from tests.gpu.conftest import Kernels
from tests.gpu.test_head_settings import JOBS as BUDGET_JOBS
from tests.gpu.test_head_settings import PLAIN, Job, budget_of, every_kernel, of_grid

pytestmark = pytest.mark.gpu

WITH_EXACT_TOKENS = ("text first", "key lengths cut the text", "lead frame, NHD")
JOBS = (
    *(job for job in BUDGET_JOBS if job.case.reason in WITH_EXACT_TOKENS),
    of_grid("an image", TokenGrid(1, 40, 30), kv_heads=4),
)
#: Of four heads; 7 is none of the token orders and means the last.
HEAD_WALK = (0, 1, 7, 0)


@every_kernel
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.case.id)
def test_each_head_takes_its_order(
    job: Job,
    kernels: Kernels,
    generator: torch.Generator,
    poison: None,
    force: Callable[[Kernels], None],
) -> None:
    force(kernels)
    case, grid = job.case, job.grid
    assert grid is not None
    q, k, v = make_qkv(case, generator)
    lengths = lengths_of(case)
    order, head_settings = grid_order(grid), budget_of(case.heads)
    order_kind = torch.tensor(HEAD_WALK, dtype=torch.int32, device="cuda")

    def run(**options):
        return attention(q, k, v, PLAIN, key_lengths=lengths, return_lse=True, **options)

    stats = AttentionStats("cuda")
    mixed, mixed_lse = run(
        order=order, head_settings=replace(head_settings, order_kind=order_kind), stats=stats
    )
    group = case.heads // (case.kv_heads or case.heads)
    taken = [
        min(HEAD_WALK[head // group * group], order.order_kinds - 1) for head in range(case.heads)
    ]
    assert len(set(taken)) > 1
    kept = 0
    for head, index in enumerate(taken):
        own = AttentionStats("cuda")
        out, lse = run(order=order.of_kind(index), head_settings=head_settings, stats=own)
        assert torch.equal(mixed[:, head], out[:, head])
        assert torch.equal(mixed_lse[:, head], lse[:, head])
        kept += own.counters[1] // case.heads
    assert stats.counters[1] == kept


def test_head_groups_keep_their_orders(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = TokenGrid(6, 14, 15)
    case = Case("groups", heads=4, kv_heads=4, queries=grid.tokens, keys=grid.tokens)
    q, k, v = make_qkv(case, generator)
    order_kind = torch.tensor(HEAD_WALK, dtype=torch.int32, device="cuda")
    head_settings = replace(budget_of(4), order_kind=order_kind)
    whole = attention(q, k, v, PLAIN, order=grid_order(grid), head_settings=head_settings)
    monkeypatch.setattr(
        importlib.import_module("sparge.stages.pipeline"), "_memory_limit", lambda _: 1
    )
    parts = attention(q, k, v, PLAIN, order=grid_order(grid), head_settings=head_settings)
    assert torch.equal(whole, parts)
