# SPDX-License-Identifier: Apache-2.0
"""The comparison with peers, without a GPU: each case is timed or named, and its row says what was
measured."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import attention
from benchmarks.cases import ranked_share
from benchmarks.peers import Absent, Peer
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import Allowance
from sparge import TokenGrid, grid_order
from sparge.session.measure import kept_shares

TINY = Shape("tiny", 2, 676, 32, TokenGrid(4, 12, 13, prefix=52))
WAYS = ("PV filter", "FP16 V", "16 bits", "budgets", "budgets spread tenfold")
MODES = ["ours", *(f"ours, {way}" for way in WAYS)]


def refuses(*_: Tensor) -> Tensor:
    raise RuntimeError("no kernel for this\nand more")


def nothing(q: Tensor, *_: Tensor) -> Tensor:
    return torch.full_like(q, torch.nan)


PEERS = [
    Peer("exact", scaled_dot_product_attention),
    Peer("broken", refuses),
    Peer("wrong", nothing),
    Absent("elsewhere", "it is not installed"),
]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """The reference stands for the kernels, and a call takes 2 ms."""

    def draw(shape: Shape) -> tuple[Tensor, ...]:
        size = (1, shape.heads, shape.tokens, shape.head_dim)
        return tuple(torch.randn(size, generator=generator) for _ in "qkv")

    def median_within(work: Callable[[], object], _: float) -> tuple[float, int]:
        work()
        return 2.0, 7

    monkeypatch.setattr(attention, "draw", draw)
    monkeypatch.setattr(attention, "peers", lambda *_: PEERS)
    monkeypatch.setattr(attention, "working", lambda peer, _: peer)
    monkeypatch.setattr(attention, "with_extra_memory", lambda work: (work(), 5))
    monkeypatch.setattr(attention, "median_within", median_within)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_run_times_or_names_every_case() -> None:
    rows = list(attention.bench(TINY, [1.0, 0.3], 15.0, Allowance(1000, 20)))
    json.dumps(rows, allow_nan=False)
    absent = {
        "broken": "RuntimeError: no kernel for this",
        "wrong": "RuntimeError: its result is not finite",
        "elsewhere": "it is not installed",
    }
    named = [(row["asked_density"], row["peer"]) for row in rows]
    dense = [(1.0, name) for name in ("exact", *absent, *MODES[:-1])]
    assert named == dense + [(0.3, name) for name in ("exact", *absent, *MODES)]
    for found in rows:
        if found["peer"] in absent:
            assert found["absent"] == absent[found["peer"]]
        else:
            assert (found["ms"], found["repeats"], found["extra_mib"]) == (2.0, 7, 5)
    ours = {(r["asked_density"], r["peer"]): r for r in rows if r["peer"].startswith("ours")}
    for (asked, name), found in ours.items():
        assert found["pooled_heads"] == (0.5 if "budgets" in name else 0.0)
        if asked == 1.0 or "budgets" not in name:
            assert found["rel_l2"] < 0.03, "arithmetic alone"
        assert asked - 1 / 11 < found["density"] <= 1.0, "of 11 key blocks a whole number"
    assert ours[0.3, "ours"]["drop_rel_l2"] > 0.3, "of noise, no key stands for another"


@pytest.mark.parametrize("name", SHAPES)
def test_a_call_keeps_the_density_that_is_asked_for(name: str) -> None:
    """But for half a step of attend, and with text and a step at least."""
    order = grid_order(SHAPES[name].grid)
    for density in (0.1, 0.5, 1.0):
        kept = kept_shares(order, [int(ranked_share(order, density) * order.key_blocks), 1])
        near = 0.0 if density == 1 else 1.001 / order.key_blocks
        assert kept[0] == pytest.approx(max(density, kept[1]), abs=near)
