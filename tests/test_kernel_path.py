# SPDX-License-Identifier: Apache-2.0
"""The path of a call that kernels serve, on a machine without them: what route is told, and which
heads a group is when not all fit in memory at once."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from sparge import AttentionStats, HeadSettings, SparsePolicy, TokenGrid, grid_order
from sparge.call import Call
from sparge.kernels import Capability
from sparge.stages import on_reference, ops
from sparge.stages.rules import RouteRules

GRID = TokenGrid(3, 6, 9)
HEADS, KV_HEADS = 6, 2


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`sparge.stages.pipeline`, the module, on a pretended GPU whose kernels nobody calls yet."""
    capability = Capability(True, "", "sm_90a")
    for name in ("sparge.stages.pipeline", "sparge.call"):
        monkeypatch.setattr(importlib.import_module(name), "capabilities", lambda _: capability)
    return importlib.import_module("sparge.stages.pipeline")


@pytest.fixture
def routed(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[RouteRules]:
    """The rules of each route launch."""
    told: list[RouteRules] = []
    names = inspect.signature(ops._route)

    def route(*args: Any) -> tuple[Tensor, Tensor]:
        given = names.bind(*args).arguments
        told.append(RouteRules.of_flat(given["numbers"], given["flags"], given["scalars"]))
        nothing = torch.zeros(1, dtype=torch.int32)
        return nothing, nothing

    monkeypatch.setattr(ops, "quantize", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(ops, "route", route)
    monkeypatch.setattr(ops, "attend", lambda *_, **__: None)
    return told


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("budgeted", [False, True])
def test_upstreams_semantics_are_of_plain_calls_alone(
    make_qkv, routed: list[RouteRules], ordered: bool, budgeted: bool
) -> None:
    """A block's mass counts its keys with an order or head settings, and lists have whole steps."""
    order = grid_order(GRID) if ordered else None
    head_settings = HeadSettings.uniform(HEADS, 0.3) if budgeted else None
    q, k, v = make_qkv(1, HEADS, GRID.tokens, 64)
    sparge.attention(q, k, v, SparsePolicy(topk=0.3), order=order, head_settings=head_settings)
    (told,) = routed
    assert told.upstream is not (ordered or budgeted)


@pytest.mark.parametrize("given", ["policy", "thresholds", "mask", "plan", "budget"])
@pytest.mark.parametrize("step", [1, 2])
def test_groups_of_heads_give_what_all_heads_give(
    make_qkv, module: Any, monkeypatch: pytest.MonkeyPatch, given: str, step: int
) -> None:
    """A group is of kv heads and of the query heads that read them: three each here."""
    q, k, v = make_qkv(2, HEADS, 300, 64, kv_heads=KV_HEADS)
    policy, options = SparsePolicy(topk=0.4), {}
    if given == "thresholds":
        policy = SparsePolicy(topk=torch.linspace(0.1, 0.9, HEADS))
    elif given == "mask":
        options["block_mask"] = torch.arange(2 * HEADS * 15).view(2, HEADS, 3, 5) % 7 < 4
    elif given == "budget":
        head_settings = HeadSettings.uniform(HEADS, 0.3, pool_weight=1.0)
        options["head_settings"] = replace(head_settings, density=torch.linspace(0.1, 0.9, HEADS))
    groups: list[int] = []

    def run(call: Call, out: Tensor, lse: Tensor | None, counters: Tensor | None) -> None:
        groups.append(call.k.shape[1])
        assert call.q.shape[1] == call.k.shape[1] * HEADS // KV_HEADS
        on_reference.run(call, out, lse, counters)

    def attend(limit: int) -> tuple[Tensor, Tensor, Tensor]:
        stats = AttentionStats("cpu")
        monkeypatch.setattr(module, "_memory_limit", lambda _: limit)
        out, lse = sparge.attention(
            q, k, v, policy, stats=stats, return_lse=True, out_layout="NHD", **options
        )
        return out, lse, stats.counters

    monkeypatch.setattr(module, "run_kernels", run)
    if given == "plan":
        kept = torch.arange(2 * HEADS * 15).view(2, HEADS, 3, 5) % 5 < 3
        options["plan"] = sparge.BlockPlan.from_kept(kept, 300, 300)
    whole = attend(1 << 40)
    assert groups == [KV_HEADS]
    groups.clear()
    needed = 1 << 20
    monkeypatch.setattr(module, "_memory_needed", lambda _: needed)
    parts = attend(needed * step // KV_HEADS)
    assert groups == [step] * (KV_HEADS // step)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
