# SPDX-License-Identifier: Apache-2.0
"""A sampling loop in PyTorch that lets a session tune its attention."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparge import SparsePolicy, TokenGrid, Unsupported
from sparge.common.metrics import rel_l2
from sparge.order.places import dealt_places
from sparge.speed.measuring_cost import UNLIMITED, Afforded
from sparge.tune import (
    MEASURING,
    Aim,
    Call,
    DenseOnce,
    Model,
    PassFacts,
    Plan,
    Session,
    Ways,
)
from sparge.tune.error_table import ErrorTable
from sparge.tune.fetched_sums import FetchedSums
from sparge.tune.ways import RunLength

GRID = TokenGrid(4, 12, 14, prefix=8)  # 680 tokens: 6 query blocks, 11 key blocks
LAYERS, HEADS, HEAD_DIM = 2, 2, 64
STEPS, DENSE = 6, 2
MODEL = Model(LAYERS, GRID, HEADS)

BUDGET = Aim("budget", 0.5)
ONE_LAYER = Model(1, GRID, HEADS)

pytestmark = pytest.mark.usefixtures("one_thread")


def session_of(
    aim: Aim | None = BUDGET, steps: int = STEPS, dense_steps: int = DENSE, **named
) -> Session:
    return Session(aim, steps=steps, dense_steps=dense_steps, even_if_slower=True, **named)


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


def sampled(
    session: Session, qkv: tuple[Tensor, ...], layout: str = "HND", steps: int = STEPS
) -> list[Tensor]:
    """The results of the last layer in each step."""
    outs = []
    for step in range(steps):
        running = session.begin_step(step, MODEL, "cpu")
        for layer in range(LAYERS):
            out = running.attend(layer, *qkv, layout=layout)
        outs.append(out)
        running.end()
    return outs


def test_the_first_steps_are_exact_and_the_others_sparse(qkv) -> None:
    session = session_of()
    outs, exact = sampled(session, qkv), scaled_dot_product_attention(*qkv)
    for step, out in enumerate(outs):
        assert torch.equal(out, exact) == (step < DENSE)
        assert rel_l2(out, exact) < 0.2
    report = session.report()
    assert report.reasons == {f"one of the first {DENSE} steps": DENSE * LAYERS}
    assert (report.densities.by_step[:, :DENSE] == 1).all()
    assert (report.densities.by_step[:, DENSE:] < 1).all()
    found = report.densities
    assert found.of_sparse_calls == pytest.approx(0.5, abs=0.1)
    of_steps = found.of_sparse_calls * (STEPS - DENSE) + DENSE
    assert found.overall == pytest.approx(of_steps / STEPS), "with those of the dense steps"
    assert f"{found.overall:.1%} of attention was computed" in str(report)
    (shape,) = report.shapes
    assert shape.density.shape == (LAYERS, HEADS) and shape.layers.tolist() == [0, 1]
    assert "a mean density of 50 %" in str(report)
    session.end()


@pytest.mark.parametrize("dense_steps", [0, 1])
def test_layouts_give_the_same_bits(qkv, dense_steps: int) -> None:
    """A run without dense steps measures its first."""
    found = []
    for layout in ("HND", "NHD"):
        given = qkv if layout == "HND" else tuple(x.transpose(1, 2) for x in qkv)
        session = session_of(Aim("quality", 0.1), dense_steps=dense_steps)
        outs = sampled(session, given, layout, steps=3)
        found.append([x if layout == "HND" else x.transpose(1, 2) for x in outs])
        reason = f"one of the first {dense_steps} steps" if dense_steps else MEASURING
        assert session.report().reasons == {reason: LAYERS}
        session.end()
    assert all(map(torch.equal, *found))
    assert torch.equal(found[0][0], scaled_dot_product_attention(*qkv))
    assert not torch.equal(*found[0][:2])


def test_the_host_computes_exact_results_once_a_call(qkv) -> None:
    session, asked = session_of(), []

    def exact() -> Tensor:
        asked.append(True)
        return scaled_dot_product_attention(*qkv)

    def fails() -> Tensor:
        asked.append(True)
        raise Unsupported("not here")

    for step in range(DENSE + 1):
        running = session.begin_step(step, MODEL, "cpu")
        for layer in range(LAYERS):
            running.attend(layer, *qkv, exact=exact)
        running.end()
    assert len(asked) == DENSE * LAYERS, "measured or not"
    session.end()
    with pytest.raises(Unsupported, match="not here"):
        session_of(dense_steps=0).begin_step(0, MODEL, "cpu").attend(0, *qkv, exact=fails)
    assert len(asked) == DENSE * LAYERS + 1


def test_the_first_step_counts_as_dense_where_none_is(qkv, monkeypatch) -> None:
    """A measurement has to pay in the steps that are left."""
    asked = []

    def affordable(self: Ways, call, most, *, run: RunLength, **_: object) -> Afforded:
        asked.append(run)
        return Afforded(most, UNLIMITED)

    monkeypatch.setattr(Ways, "affordable", affordable)
    session = Session(Aim("budget", 0.5), steps=STEPS, dense_steps=0)
    session.begin_step(0, MODEL, "cpu").attend(0, *qkv)
    assert asked == [RunLength(LAYERS, STEPS - 1)]


def test_a_device_may_be_named_in_two_ways(qkv) -> None:
    session = session_of(steps=3, dense_steps=1)
    for step, device in enumerate(("cpu:0", "cpu", "cpu:0")):
        running = session.begin_step(step, ONE_LAYER, device)
        running.attend(0, *qkv)
        running.end()
    assert list(session.report().reasons) == ["one of the first 1 steps"]


@pytest.mark.parametrize("why", ["backward", "differ in number", "meta", "192", "fewer layers"])
def test_some_calls_are_exact_in_every_step(qkv, why: str) -> None:
    q, k, v = (x.clone() for x in qkv)
    given = {
        "backward": (q.requires_grad_(), k, v),
        "differ in number": (q.detach(), k[:, :, :77], v[:, :, :77]),
        "meta": tuple(x.to("meta") for x in (q, k, v)),
        "192": tuple(torch.cat([x] * 3, -1) for x in qkv),  # head_dim
        "fewer layers": qkv,
    }[why]
    layer = 10**9 if why == "fewer layers" else 0
    session = session_of(steps=3, dense_steps=0 if why == "192" else 1)
    for step in range(3):
        running = session.begin_step(step, ONE_LAYER, "cpu")
        out = running.attend(layer, *given)
        running.end()
        if why != "meta":
            assert torch.equal(out, scaled_dot_product_attention(*given))
    (reason,) = running.reasons
    assert why in reason
    assert why == "192" or session.report().reasons == {reason: 3}, "it would have been measured"
    assert ".." not in str(session.report())


def test_compiled_models_call_it_as_it_is(qkv) -> None:
    q, k, v = qkv
    sessions = [session_of(steps=3, dense_steps=1) for _ in range(2)]
    running: list[Any] = [None, None]

    def layer(index: int, q: Tensor) -> Tensor:
        return running[index].attend(0, q * 2, k, v) + 1

    compiled = torch.compile(layer, backend="eager")
    for step in range(3):
        running[:] = [session.begin_step(step, ONE_LAYER, "cpu") for session in sessions]
        assert torch.equal(compiled(0, q), layer(1, q))
        for one in running:
            one.end()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Aim("Budget", 0.5), "kind"),
        (lambda: Aim("budget", 50), "value"),
        (lambda: Aim("quality", float("nan")), "value"),
        (lambda: session_of(0.5), "Aim"),  # type: ignore[arg-type]
        (lambda: session_of(steps=6.0), "steps"),  # type: ignore[arg-type]
        (lambda: session_of(dense_steps=-1), "dense_steps"),
    ],
)
def test_arguments_of_another_kind_are_named(make: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


def test_layers_shapes_and_layouts_are_checked(qkv) -> None:
    running = session_of().begin_step(0, MODEL, "cpu")
    flat = [x[0] for x in qkv]
    for layer, given, layout, named in (
        (-1, qkv, "HND", "layer"), (0, flat, "HND", "B, H, N, D"), (0, qkv, "BHND", "HND"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            running.attend(layer, *given, layout=layout)
    prompts = session_of().begin_step(0, MODEL, "cpu", conditioning=(0, 1))
    with pytest.raises(ValueError, match="names 2 prompts and the batch has 1 entries"):
        prompts.attend(0, *qkv)


def test_a_choice_that_was_interrupted_is_made_in_the_next_step(qkv, monkeypatch) -> None:
    session, choose = session_of(), FetchedSums.error_table
    tries = []

    def interrupted_once(sums: FetchedSums) -> ErrorTable:
        tries.append(sums)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return choose(sums)

    monkeypatch.setattr(FetchedSums, "error_table", interrupted_once)
    for step in range(STEPS):
        try:
            running = session.begin_step(step, ONE_LAYER, "cpu")
            running.attend(0, *qkv)
            running.end()
        except KeyboardInterrupt:
            assert step == DENSE - 1
    assert len(tries) == 2 and not running.reasons


@pytest.mark.parametrize("aim", [None, BUDGET], ids=["manual", "auto"])
def test_calls_of_one_size_may_have_other_exact_ends(qkv, aim: Aim | None) -> None:
    session = session_of(aim)
    for step in range(DENSE + 1):
        running = session.begin_step(step, ONE_LAYER, "cpu")
        if step < DENSE:
            running.attend(0, *qkv)
            running.end()
    call = Call(*qkv)
    for ends in (None, (0, 0), (0, 16), None):
        plan = running.plan(call, 0, DenseOnce(call.exact), ends)
        assert isinstance(plan, Plan)
        found = plan.policy.exact_prefix, plan.policy.exact_suffix
        assert found == (ends or (GRID.prefix, GRID.suffix))


@pytest.mark.parametrize("aim", [None, BUDGET], ids=["manual", "auto"])
def test_tokens_that_ranks_were_dealt_give_what_one_gets(qkv, aim: Aim | None) -> None:
    """Text, then the clip with an image that lies on no grid of it, each dealt by itself."""
    grid = TokenGrid(3, 12, 14, prefix=8, tail=168)
    places, outs = dealt_places((8, 672), 2), []
    for ranks in (1, 2):
        session, model = session_of(aim, steps=2, dense_steps=1), Model(1, grid, HEADS, ranks)
        given = qkv if ranks == 1 else tuple(x[:, :, places] for x in qkv)
        for step in range(2):
            running = session.begin_step(step, model, "cpu", policy=SparsePolicy(topk=0.3))
            out = running.attend(0, *given)
            running.end()
        assert not running.reasons, "sparse"
        outs.append(out)
    torch.testing.assert_close(outs[1], outs[0][:, :, places], rtol=0, atol=5e-3)


def test_a_session_that_has_ended_holds_no_order_on_the_device() -> None:
    session, device = session_of(None, steps=3, dense_steps=0), torch.device("meta")
    orders = []
    for step in range(3):
        begun = session.begin_pass(ONE_LAYER, SparsePolicy(), device, PassFacts((0,), step))
        x = torch.empty(1, HEADS, GRID.tokens, HEAD_DIM, device=device, dtype=torch.bfloat16)
        plan = begun.plan(Call(x, x, x), 0, DenseOnce(lambda x=x: x))
        assert isinstance(plan, Plan) and plan.order is not None
        orders.append(weakref.ref(plan.order.slot_tokens))
        assert plan.order.slot_tokens.device == device
        del plan
        begun.end()
    session.end()
    del begun
    gc.collect()
    assert [order() for order in orders] == [None] * 3
