# SPDX-License-Identifier: Apache-2.0
"""Runs in auto modes: what is measured, when heads are chosen, what sparse calls are given."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from tests.nodes.parts import BLOCKS, HEADS, TOKENS, network

pytestmark = pytest.mark.usefixtures("reference_allowed")

DENSE_THEN_SPARSE = [1.0, 0.9, 0.7, 0.6, 0.5]
AUTO = {"mode": "auto quality"}


@pytest.fixture
def step(generator):
    """A forward pass: a long self-attention in each block, of keys that are alike in space."""
    drift = torch.linspace(0, 30, TOKENS)[:, None] + torch.arange(HEADS * 64)
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)
    layers[:, 1] += 2 * drift.sin()
    return lambda attend: [attend(*layer, HEADS) for layer in layers]


@pytest.mark.parametrize("known", [True, False], ids=["wan", "another model"])
@pytest.mark.parametrize("dense", [[], [0.9], [1.0, 0.95, 0.9]], ids=len)
@pytest.mark.parametrize("conditionings", [([1, 0],), ([0], [1])], ids=str)
def test_the_last_dense_step_is_measured_or_the_first_of_all(
    sampled, step, asked, known, dense, conditionings
):
    """Unknown models, whose shapes nobody expects before a call, are measured there, too."""
    got = sampled(
        step, [*dense, 0.5, 0.4, 0.3], None if known else torch.nn.Module(),
        conditionings=conditionings, mode="auto budget" if known else "auto quality",
        start_percent=0.2 if dense else 0.0,
    )  # fmt: skip
    passes = BLOCKS * len(conditionings)
    why = "before start_percent 0.2" if dense else "measuring"
    assert got.counts.reasons == {why: max(1, len(dense)) * passes}
    assert got.counts.sparse == len(asked) == (3 if dense else 2) * passes
    assert {(call.order and call.order.tokens, call.heads) for call in asked} == {
        (TOKENS if known else None, HEADS)
    }


@pytest.mark.parametrize("start", [0.0, 0.2])
@pytest.mark.parametrize("mode", ["manual", "auto quality", "auto budget"])
def test_calls_for_one_head_at_a_time(sampled, generator, mode, start):
    """As many as a layer has heads, of a model that publishes no layer; text is among its
    tokens."""
    text, heads, layers = 24, 6, 2
    clip = torch.randn(1, text + TOKENS, 64, generator=generator)

    def step(attend):
        for _ in range(layers * heads):
            attend(clip, clip, clip, 1)

    got = sampled(
        step, DENSE_THEN_SPARSE, network("MiniMaxH3Model", num_heads=heads, blocks=range(layers)),
        context=torch.zeros(1, text, 8), mode=mode, topk=0.7, start_percent=start,
    )  # fmt: skip
    a_pass, passes = layers * heads, len(DENSE_THEN_SPARSE)
    dense = (2 if start else 1 if mode != "manual" else 0) * a_pass
    assert (got.counts.sparse, got.counts.dense) == (passes * a_pass - dense, dense)
    by_step = got.last.densities.by_step
    assert by_step.shape == (a_pass, passes) and not by_step.isnan().any()
    assert (by_step[:, 0] < 1).all() == (dense == 0)


@pytest.mark.parametrize("mode", ["manual", "auto quality"])
@pytest.mark.parametrize("chunks", [1, HEADS])
def test_what_other_calls_do_without_is_allocated_untracked(
    load_pack, sampled, generator, monkeypatch, chunks, mode
):
    """A look at a result, and counters of rows that nobody expected; and few calls stop the
    recording of allocations."""
    inside, entered, made = [], [], Counter()
    clip = torch.randn(1, TOKENS, HEADS * 64, generator=generator)

    @contextmanager
    def context():
        entered.append(1)
        inside.append(1)
        yield
        inside.pop()

    def noted(record, name, value):
        if value is not None and name in ("pairs", "_nan"):
            made[name, bool(inside)] += 1
        object.__setattr__(record, name, value)

    def step(attend):
        for part in 10 * BLOCKS * clip.chunk(chunks, 2):
            attend(part, part, part, HEADS // chunks)

    monkeypatch.setattr(load_pack("sparge.session.report").PassRecord, "__setattr__", noted)
    monkeypatch.setattr(load_pack("nodes.run"), "untracked_allocations", context)
    auto, model = mode != "manual", network(blocks=range(10 * BLOCKS))
    got = sampled(step, [0.9, 0.5] if auto else [0.5], model, mode=mode)
    assert got.counts.sparse == 10 * BLOCKS * chunks
    growths = {} if auto or chunks == 1 else {("pairs", True): 1}  # dense steps tell the rows
    assert made == {("pairs", False): 1, ("_nan", True): 1} | growths
    assert len(entered) - auto * 10 * BLOCKS * chunks < 10, "each layer is measured once"


def test_the_result_of_a_run_holds_nothing_of_it(sampled, step, runs):
    got = sampled(step, DENSE_THEN_SPARSE, **AUTO)
    report, run = got.last, weakref.ref(got.run)
    del got
    runs.clear()
    gc.collect()
    assert run() is None
    found = report.densities
    assert found.by_step.shape == (BLOCKS, len(DENSE_THEN_SPARSE))
    assert (found.by_step[:, :2] == 1).all()
    assert found.of_sparse_calls == pytest.approx(float(found.by_step[:, 2:].mean()))
    (heads,) = report.heads
    assert list(heads.layers) == list(range(BLOCKS))
    torch.testing.assert_close(heads.density.mean(1), found.by_step[:, 2:].mean(1))
    assert report.error == pytest.approx(float((heads.expected * heads.weight).mean()))
    assert 0 < report.error <= 0.06, "blocks are large beside so few tokens"
