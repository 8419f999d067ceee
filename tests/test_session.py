# SPDX-License-Identifier: Apache-2.0
"""A sampling loop in PyTorch that lets a session tune its attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparge import TokenGrid, Unsupported
from sparge.common.metrics import rel_l2
from sparge.speed.sample_cost import UNLIMITED, Afforded
from sparge.tune import MEASURING, Aim, Fingerprint, Model, Probe, Session, tables

GRID = TokenGrid(4, 12, 14, prefix=8)  # 680 tokens: 6 query blocks, 11 key blocks
LAYERS, HEADS, HEAD_DIM = 2, 2, 64
STEPS, DENSE = 6, 2
MODEL = Model(LAYERS, GRID, HEADS)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def qkv(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbours are alike."""
    axes = [torch.arange(n) for n in (GRID.frames, GRID.height, GRID.width)]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 2).float()
    waves = torch.randn(3, HEAD_DIM, generator=generator) / 3
    field = torch.cat(
        [torch.randn(GRID.prefix, HEAD_DIM, generator=generator), (place @ waves).sin()]
    )

    def draw(noise: float) -> Tensor:
        return field + noise * torch.randn(1, HEADS, GRID.tokens, HEAD_DIM, generator=generator)

    return draw(0.3), draw(0.3), draw(0.5)


def sampled(session: Session, qkv: tuple[Tensor, ...], layout: str = "HND") -> list[Tensor]:
    """The results of the last layer in each step."""
    outs = []
    for step in range(STEPS):
        running = session.begin_step(step, MODEL, "cpu")
        for layer in range(LAYERS):
            out = running.attend(layer, *qkv, layout=layout)
        outs.append(out)
        running.end()
    return outs


def test_the_first_steps_are_exact_and_the_others_sparse(qkv) -> None:
    session = Session(Aim("budget", 0.5), steps=STEPS, dense_steps=DENSE, even_if_slower=True)
    outs, exact = sampled(session, qkv), scaled_dot_product_attention(*qkv)
    for step, out in enumerate(outs):
        assert torch.equal(out, exact) == (step < DENSE)
        assert rel_l2(out, exact) < 0.2
    report = session.report()
    assert report.reasons == {f"one of the first {DENSE} steps": DENSE * LAYERS}
    assert (report.densities.by_step[:, :DENSE] == 1).all()
    assert (report.densities.by_step[:, DENSE:] < 1).all()
    assert report.densities.overall == pytest.approx(0.5, abs=0.1)
    (shape,) = report.shapes
    assert shape.density.shape == (LAYERS, HEADS) and shape.layers.tolist() == [0, 1]
    assert "a mean density of 50 %" in str(report)
    session.end()


def test_layouts_give_the_same_bits(qkv) -> None:
    outs = []
    for layout in ("HND", "NHD"):
        given = qkv if layout == "HND" else tuple(x.transpose(1, 2) for x in qkv)
        session = Session(Aim("quality", 0.1), steps=STEPS, dense_steps=DENSE, even_if_slower=True)
        out = sampled(session, given, layout)[-1]
        outs.append(out if layout == "HND" else out.transpose(1, 2))
        session.end()
    assert torch.equal(*outs)


def test_a_run_without_dense_steps_measures_its_first(qkv) -> None:
    session = Session(Aim("budget", 0.5), steps=STEPS, dense_steps=0, even_if_slower=True)
    outs, exact = sampled(session, qkv), scaled_dot_product_attention(*qkv)
    assert torch.equal(outs[0], exact) and not torch.equal(outs[1], exact)
    assert session.report().reasons == {MEASURING: LAYERS}
    session.end()


def test_the_host_computes_exact_results(qkv) -> None:
    session = Session(Aim("budget", 0.5), steps=STEPS, dense_steps=DENSE, even_if_slower=True)
    asked = []

    def exact() -> Tensor:
        asked.append(True)
        return scaled_dot_product_attention(*qkv)

    for step in range(DENSE + 1):
        running = session.begin_step(step, MODEL, "cpu")
        for layer in range(LAYERS):
            running.attend(layer, *qkv, exact=exact)
        running.end()
    assert len(asked) == DENSE * LAYERS  # once a call, measured or not
    session.end()


def test_a_call_that_cannot_be_sparse_is_exact_and_says_why(qkv) -> None:
    session = Session(Aim("budget", 0.5), steps=STEPS, dense_steps=0, even_if_slower=True)
    q, k, v = (torch.cat([x] * 3, -1) for x in qkv)  # head_dim 192
    for step in range(2):
        running = session.begin_step(step, Model(1, GRID, HEADS), "cpu")
        out = running.attend(0, q, k, v)
        assert torch.equal(out, scaled_dot_product_attention(q, k, v))
        running.end()
    (reason,) = running.reasons
    assert "192" in reason
    session.end()


def test_unknown_layouts_are_named(qkv) -> None:
    session = Session(Aim("budget", 0.5), steps=STEPS, dense_steps=DENSE)
    with pytest.raises(ValueError, match="HND"):
        session.begin_step(0, MODEL, "cpu").attend(0, *qkv, layout="BHND")


def test_the_first_step_counts_as_dense_where_none_is(qkv, monkeypatch) -> None:
    """What is measured has to pay in the steps that are left."""
    asked = []

    def affordable(call, most, *_, layers: int, dense_steps: int, sparse_steps: int | None):
        asked.append((layers, dense_steps, sparse_steps))
        return Afforded(most, UNLIMITED)

    monkeypatch.setattr(tables, "affordable", affordable)
    session = Session(Aim("budget", 0.5), steps=STEPS, dense_steps=0)
    session.begin_step(0, MODEL, "cpu").attend(0, *qkv)
    assert asked == [(LAYERS, 1, STEPS - 1)]


def test_a_device_may_be_named_in_two_ways(qkv) -> None:
    session = Session(Aim("budget", 0.5), steps=3, dense_steps=1, even_if_slower=True)
    for step, device in enumerate(("cpu:0", "cpu", "cpu:0")):
        running = session.begin_step(step, Model(1, GRID, HEADS), device)
        running.attend(0, *qkv)
        running.end()
    assert list(session.report().reasons) == ["one of the first 1 steps"]


def test_a_host_that_fails_is_asked_once(qkv) -> None:
    asked = []

    def exact() -> Tensor:
        asked.append(True)
        raise Unsupported("not here")

    session = Session(Aim("budget", 0.5), steps=STEPS, dense_steps=0, even_if_slower=True)
    with pytest.raises(Unsupported, match="not here"):
        session.begin_step(0, MODEL, "cpu").attend(0, *qkv, exact=exact)
    assert len(asked) == 1


@pytest.mark.parametrize("why", ["backward", "cross-attention", "meta"])
def test_some_calls_are_exact_in_every_step(qkv, why: str) -> None:
    given = tuple(x.clone() for x in qkv)
    if why == "backward":
        given[0].requires_grad_()
    elif why == "cross-attention":
        given = given[0], given[1][:, :, :77], given[2][:, :, :77]
    else:
        given = tuple(x.to("meta") for x in given)
    session = Session(Aim("budget", 0.5), steps=3, dense_steps=1, even_if_slower=True)
    for step in range(3):
        running = session.begin_step(step, Model(1, GRID, HEADS), "cpu")
        out = running.attend(0, *given)
        running.end()
        if why != "meta":
            assert torch.equal(out, scaled_dot_product_attention(*given))
    ((reason, count),) = session.report().reasons.items()
    assert why in reason and count == 3
    assert ".." not in str(session.report())


def test_a_probe_without_memory_costs_no_result(qkv, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Probe, "sample", full)
    session = Session(Aim("budget", 0.5), steps=STEPS, dense_steps=DENSE, even_if_slower=True)
    outs, exact = sampled(session, qkv), scaled_dot_product_attention(*qkv)
    assert not torch.equal(outs[-1], exact)
    assert list(session.report().reasons) == [f"one of the first {DENSE} steps"]


def test_compiled_models_call_it_as_it_is(qkv) -> None:
    q, k, v = qkv
    sessions = [
        Session(Aim("budget", 0.5), steps=4, dense_steps=1, even_if_slower=True) for _ in range(2)
    ]
    running = [session.begin_step(0, Model(1, GRID, HEADS), "cpu") for session in sessions]

    def layer(index: int, q: Tensor) -> Tensor:
        return running[index].attend(0, q * 2, k, v) + 1

    compiled = torch.compile(layer, backend="eager")
    for step in range(4):
        for index, session in enumerate(sessions):
            running[index] = session.begin_step(step, Model(1, GRID, HEADS), "cpu")
        assert torch.equal(compiled(0, q), layer(1, q))
        for one in running:
            one.end()


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [("Budget", 0.5, "kind"), ("budget", 50, "value"), ("quality", float("nan"), "value")],
)
def test_aims_are_checked(kind: str, value: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Aim(kind, value)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"aim": 0.5}, "Aim"), ({"steps": 6.0}, "steps"), ({"dense_steps": -1}, "dense_steps")],
)
def test_arguments_of_another_kind_are_named(given: dict, named: str) -> None:
    everything: dict[str, Any] = {"aim": Aim("budget", 0.5)} | given
    with pytest.raises(ValueError, match=named):
        Session(**everything)


def test_layers_and_shapes_are_checked(qkv) -> None:
    running = Session(Aim("budget", 0.5), steps=STEPS).begin_step(0, MODEL, "cpu")
    with pytest.raises(ValueError, match="layer"):
        running.attend(-1, *qkv)
    with pytest.raises(ValueError, match="B, H, N, D"):
        running.attend(0, *(x[0] for x in qkv))


def test_a_profile_serves_its_own_aim_alone(qkv) -> None:
    session = Session(Aim("budget", 0.5), steps=STEPS, dense_steps=DENSE, even_if_slower=True)
    sampled(session, qkv)
    profile = session.profile(Fingerprint.of("toy", {"weight": torch.ones(4)}))
    reasons = []
    for aim in (Aim("budget", 0.5), Aim("quality", 0.1)):
        remarks: list[str] = []
        again = Session(
            aim, steps=2, dense_steps=0, profile=profile, note=remarks.append, even_if_slower=True
        )
        running = again.begin_step(0, MODEL, "cpu")
        running.attend(0, *qkv)
        reasons.append((list(running.reasons), remarks))
    measured = "The profile is for a mean density of 50 %, not for a mean error of 0.1, so this run"
    assert reasons == [([], []), ([MEASURING], [f"{measured} measures"])]
