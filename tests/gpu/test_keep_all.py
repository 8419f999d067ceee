# SPDX-License-Identifier: Apache-2.0
"""Heads that keep every block: nothing is scored, and where the host knows so Q is not averaged."""

from __future__ import annotations

import importlib
from ctypes import Structure
from dataclasses import replace
from typing import Any

import pytest
import torch

import sparge
from sparge import AttentionStats, HeadSettings, Router, SparsePolicy, TokenGrid, cube_order
from sparge.kernels.params import QuantizeParams

pytestmark = pytest.mark.gpu

DENSE = SparsePolicy(topk=1.0)
TOKENS = 1100  # nine query blocks and eighteen key blocks, the last of both ragged


@pytest.mark.parametrize("lengths", [None, (1100, 700)], ids=["full", "ragged"])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_what_a_mask_of_ones_keeps(causal: bool, lengths, make_qkv) -> None:
    qkv = make_qkv(2, 4, TOKENS, 128, kv_heads=2, device="cuda")
    options: dict[str, Any] = {"is_causal": causal, "return_lse": True}
    if lengths is not None:
        options["key_lengths"] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    ones = torch.ones(2, 4, 9, 18, dtype=torch.bool, device="cuda")
    by_mask, by_topk = AttentionStats("cuda"), AttentionStats("cuda")
    wanted = sparge.attention(*qkv, DENSE, block_mask=ones, stats=by_mask, **options)
    found = sparge.attention(*qkv, DENSE, stats=by_topk, **options)
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(by_topk.counters, by_mask.counters) and by_topk.density == 1


@pytest.mark.parametrize("topk", [1.0, 0.5])
def test_q_is_averaged_for_those_that_score(topk: float, make_qkv, monkeypatch) -> None:
    launch = importlib.import_module("sparge.stages.launch")
    queue, averages = launch.queue, []

    def watched(kernel: Any, grid: Any, params: Structure, *shared: int) -> None:
        if isinstance(params, QuantizeParams):
            averages.append(bool(params.with_queries))
        queue(kernel, grid, params, *shared)

    monkeypatch.setattr(launch, "queue", watched)
    qkv = make_qkv(2, 4, TOKENS, 128, kv_heads=2, device="cuda")
    sparge.attention(*qkv, SparsePolicy(topk=topk))
    assert averages == [topk < 1]


@pytest.mark.parametrize("router", [Router.MASS, Router.ERROR])
def test_with_a_budget_and_an_order(router: Router, make_qkv) -> None:
    qkv = make_qkv(1, 4, TOKENS, 128, kv_heads=2, device="cuda")
    order = cube_order(TokenGrid(5, 10, 20, suffix=100))
    every = HeadSettings.uniform(4, 1.0, 0.5, router, "cuda")
    some = replace(every, density=torch.tensor([1.0, 0.3, 1.0, 0.3], device="cuda"))
    wanted, found = (sparge.attention(*qkv, order=order, head_settings=b) for b in (every, some))
    same = [torch.equal(found[:, head], wanted[:, head]) for head in range(4)]
    assert same == [True, False, True, False]
