# SPDX-License-Identifier: Apache-2.0
"""Runs in auto modes: what is measured, when heads are chosen, what sparse calls are given."""

from __future__ import annotations

import copy
import itertools
from contextlib import contextmanager

import pytest
import torch

from tests.nodes.parts import BLOCKS, HEADS, LATENT, TOKENS, network

pytestmark = pytest.mark.usefixtures("reference_allowed")

DENSE_THEN_SPARSE = [1.0, 0.9, 0.7, 0.6, 0.5]


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
def test_what_other_calls_do_without_is_allocated_untracked(
    load_pack, sampled, step, monkeypatch, mode
):
    """Each layer is measured once, and few calls more stop the recording of allocations."""
    inside, entered, measured = [], [], []
    heads = load_pack("sparge.session.heads")
    measure = heads.measure

    @contextmanager
    def context():
        entered.append(1)
        inside.append(1)
        yield
        inside.pop()

    def noted(*args, **kwargs):
        measured.append(bool(inside))
        return measure(*args, **kwargs)

    monkeypatch.setattr(heads, "measure", noted)
    monkeypatch.setattr(load_pack("nodes.run"), "untracked_allocations", context)
    sampled(lambda attend: [step(attend) for _ in range(10)], [0.9, 0.5], mode=mode)
    layers = 10 * BLOCKS if mode != "manual" else 0
    assert all(measured) and bool(measured) == (layers > 0)
    assert len(entered) - layers < 10


@pytest.mark.parametrize(("arch", "given"), [("sm_89", 15.0), ("sm_90a", 50.0)])
def test_pvthreshd_is_left_out_where_it_saves_no_time(
    load_pack, sampled, step, asked, monkeypatch, arch, given
):
    capability = load_pack("sparge.kernels").Capability(True, "", arch)
    schedule = load_pack("sparge.session.schedule")
    monkeypatch.setattr(schedule, "capabilities", lambda device: capability)
    got = sampled(step, [0.9, 0.6], pvthreshd=15.0)
    assert {call.policy.pvthreshd for call in asked} == {given}
    assert got.counts.filter_left_out == (given != 15.0)


def test_a_second_model_of_a_guider_is_measured_by_itself(session, patch, runs, step):
    """ComfyUI's DualModelGuider runs it with the options of the one that is sampled."""
    sampling = session(patch(mode="auto quality"), LATENT)
    first = sampling.model
    second = type(first)(diffusion_model=copy.deepcopy(first.diffusion_model))
    models = itertools.cycle([second, first])

    def in_turn(attend):
        sampling.model = next(models)  # of the pass that follows
        return step(attend)

    sampling.sample(in_turn, [1.0, 0.9, 0.7], conditionings=([0], [0]))
    ((run, _),) = runs
    assert [heads.sparse_rows for heads in run.heads.by_shape.values()] == [{*range(BLOCKS)}] * 2
    (note, *_) = run.report().notes
    assert note.startswith("the guider runs a second model") and note.endswith("measured apart")
    other = object()  # a copy on another device is none
    assert run.which(other, torch.device("meta")) == run.which(first, run._device) == 0
    assert run.which(other, run._device) == id(other)
