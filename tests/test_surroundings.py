# SPDX-License-Identifier: Apache-2.0
"""Surroundings of a call: autocast, default dtypes and devices, derivatives, compiling.

None of them changes a result without a word.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge import HeadSettings, Precision, Router, SparsePolicy, TokenGrid, grid_order
from sparge.session import Aim, Session, TokenLayout
from sparge.session.choose import Curves
from sparge.session.measure import Candidates, MeasuredCall, Sums, measure

attention: Any = sparge.attention
SPARSE = SparsePolicy(topk=0.4)


@contextmanager
def default(kind: str, value: object) -> Iterator[None]:
    before = getattr(torch, f"get_default_{kind}")()
    change = getattr(torch, f"set_default_{kind}")
    change(value)
    try:
        yield
    finally:
        change(None if kind == "device" else before)  # a default "cpu" would stay a function mode


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast fp16": lambda: torch.autocast("cpu", torch.float16),
    "default bf16": lambda: default("dtype", torch.bfloat16),
    "default fp16": lambda: default("dtype", torch.float16),
    "default fp64": lambda: default("dtype", torch.float64),
    "device context": lambda: torch.device("meta"),
    "default device": lambda: default("device", "meta"),
}
GRID = TokenGrid(3, 6, 10, prefix=70, suffix=40)


class Results:
    """Inputs are made before, as a caller's tensors are; what the library makes, inside."""

    def __init__(self, make_qkv: Any, precision: Precision) -> None:
        self.qkv = make_qkv(1, 2, GRID.tokens, 64, dtype=torch.float32)
        self.order = grid_order(GRID)
        self.shares = torch.tensor([0.3, 0.6])
        self.order_kind = torch.tensor([0, 1], dtype=torch.int32)
        self.lengths = torch.tensor([200], dtype=torch.int32)
        self.policy = replace(SPARSE, precision=precision, simthreshd1=0.2, pvthreshd=5.0)

    def __iter__(self) -> Iterator[Tensor]:
        (q, k, v), policy = self.qkv, self.policy
        by_mass = replace(policy, select_by="cdf", cdfthreshd=0.7)
        for each in (by_mass, replace(policy, topk=self.shares)):
            yield from attention(q, k, v, each, return_lse=True, is_causal=True)
        yield attention(q, k, v, policy, key_lengths=self.lengths)
        yield from attention(q[:, :, :90], k, v, policy, return_lse=True, causal="bottom-right")
        stats = sparge.AttentionStats("cpu")
        head_settings = HeadSettings.uniform(2, 0.3, 0.5, Router.ERROR)
        yield from (head_settings.density, head_settings.table(policy))
        named = {"return_lse": True, "stats": stats}
        yield from attention(q, k, v, policy, head_settings=head_settings, **named)
        in_orders = replace(head_settings, order_kind=self.order_kind)
        yield attention(q, k, v, policy, head_settings=in_orders, order=self.order, stats=stats)
        yield stats.counters
        candidates, sums = Candidates.of(self.order, torch.device("cpu")), Sums()
        sums.add(0, measure(MeasuredCall(q, k, v, 0.125, self.order, candidates, [1])), 1)
        curves = Curves.of(sums, candidates)
        yield curves.error
        yield curves.settings(curves.chosen(budgets=[0.5])).density


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.SIXTEEN_BIT])
def test_nothing_around_changes_a_bit(make_qkv, precision, around: Callable[[], Any]) -> None:
    results = Results(make_qkv, precision)
    expected = list(results)
    with around():
        found = list(results)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.device == other.device
        assert torch.equal(one, other)


@pytest.mark.parametrize("around", ["default bf16", "default fp64", "default device"])
def test_a_session_reports_the_same(make_qkv, monkeypatch, around: str) -> None:
    monkeypatch.setenv("SPARGE_REFERENCE", "1")
    layout, x = TokenLayout.of(layers=2, grid=GRID), make_qkv(1, 2, GRID.tokens, 64)[0]

    def told() -> list[str]:
        session = Session.of(Aim("budget", 0.5), steps=3)
        for step in range(3):
            running = session.begin_step(step, layout, "cpu")
            for layer in range(2):
                running.attend(layer, x, x, x)
            running.end()
        report = session.report()
        assert report.densities.by_step.dtype == report.of_heads("density").dtype == torch.float32
        return [str(report), *report.details()]

    expected = told()
    assert "layer, density" in "".join(expected)
    with SURROUNDINGS[around]():
        assert told() == expected


FORWARD, REVERSE = "no forward-mode derivative", "no backward pass"


class TestDerivatives:
    """Derivatives of everything that a result depends on are refused."""

    def test_by_inputs(self, make_qkv) -> None:
        qkv = make_qkv(1, 2, 130, 64, dtype=torch.float32)
        for place, x in enumerate(qkv):

            def call(x: Tensor, place: int = place) -> Tensor:
                return attention(*qkv[:place], x, *qkv[place + 1 :], SPARSE)

            with pytest.raises(sparge.Unsupported, match=FORWARD):
                torch.func.jvp(call, (x,), (torch.ones_like(x),))
            with pytest.raises(sparge.Unsupported, match=REVERSE):
                torch.func.grad(lambda x, call=call: call(x).sum())(x)
            for grad in (True, False):
                with torch.set_grad_enabled(grad), forward_ad.dual_level():
                    assert torch.equal(call(x), attention(*qkv, SPARSE)), "a level is no tangent"
                    with pytest.raises(sparge.Unsupported, match=FORWARD):
                        call(forward_ad.make_dual(x, torch.ones_like(x)))

    def test_by_thresholds_and_head_settings(self, make_qkv) -> None:
        learned = torch.tensor([0.5, 0.5], requires_grad=True)
        cases: list[dict[str, Any]] = []
        for name in ("topk", "cdfthreshd", "simthreshd1", "pvthreshd"):
            cases.append({"policy": replace(SPARSE, **{name: learned})})
        for name in ("density", "pool_weight", "output_scale"):
            settings = replace(HeadSettings.uniform(2, 0.3), **{name: learned})
            cases.append({"head_settings": settings})
        for named in cases:
            with pytest.raises(sparge.Unsupported, match=REVERSE):
                attention(*make_qkv(), **named)
            with torch.no_grad():
                attention(*make_qkv(), **named)


def test_compiled_code_catches_a_refusal(make_qkv) -> None:
    """One graph holds it: a caller with a dense path takes it there as elsewhere."""
    torch._dynamo.reset()
    q, k, v = make_qkv(1, 2, 100, 64, kv_tokens=300)

    def layer(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        try:
            return attention(q, k, v, SPARSE, is_causal=causal)
        except sparge.Unsupported as refusal:
            if "two things" not in refusal.reason:
                raise
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    dense = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(compiled(q, k, v, True), dense)
    assert torch.equal(compiled(q, k, v, False), attention(q, k, v, SPARSE))


def test_a_refusal_is_an_exception_like_others() -> None:
    refusal = sparge.Unsupported("the reason")
    for same in (pickle.loads(pickle.dumps(refusal)), copy.copy(refusal)):
        assert type(same) is sparge.Unsupported and isinstance(same, ValueError)
        assert same.reason == str(same) == "the reason"
    assert sparge.Unsupported().reason == ""
