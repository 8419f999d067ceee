# SPDX-License-Identifier: Apache-2.0
"""A sampling loop in PyTorch that a session serves, and the passes of other frameworks."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.metrics import rel_l2
from sparge import Precision, SparsePolicy, TokenGrid, Unsupported, grid_order
from sparge.kernels.warmup import Needs
from sparge.order.grid import dealt_places
from sparge.session import (
    FAILED,
    MASK,
    Aim,
    Call,
    Layer,
    Pass,
    Session,
    Settings,
    Step,
    TextPosition,
    TokenLayout,
)
from sparge.session import session as module
from sparge.session.heads import MEASURING
from tests.session.parts import (
    BUDGET,
    CPU,
    FAST,
    GRID,
    HEADS,
    LAYERS,
    LAYOUT,
    ONE_LAYER,
    Qkv,
    heads_of,
    neighbours_alike,
    sampled,
    session_of,
)

pytestmark = pytest.mark.usefixtures("by_reference")

DENSE = "one of the first 2 steps"
#: Of a grid, where a TokenGrid belongs.
SIZES: Any = (4, 6, 10)


def test_the_first_steps_are_exact_and_the_others_sparse(qkv: Qkv) -> None:
    session = session_of()
    outs, exact = sampled(session, qkv), scaled_dot_product_attention(*qkv)
    for step, out in enumerate(outs):
        assert torch.equal(out, exact) == (step < 2)
        assert rel_l2(out, exact) < 0.6
    report = session.report()
    found = report.densities
    assert report.counts.reasons == {DENSE: 2 * LAYERS} and report.counts.sparse == 4 * LAYERS
    assert found.layers.tolist() == [0, 1] and (found.by_step[:, :2] == 1).all()
    assert 0.4 < found.of_sparse_calls <= 0.5 and not report.counts.eight_bit
    assert found.overall == pytest.approx((2 + 4 * found.of_sparse_calls) / 6)
    assert found.of_steps.mean() == pytest.approx(found.overall)
    (heads,) = report.heads
    assert heads.density.mean() == pytest.approx(found.of_sparse_calls, abs=0.01)
    assert heads.density.numel() == LAYERS * HEADS and heads.tokens == GRID.tokens
    for words in (f"{found.overall:.1%} of attention was computed", "a mean density of 50 %"):
        assert words in str(report)


def test_layouts_give_the_same_bits(qkv: Qkv) -> None:
    """A run without dense steps measures its first."""
    found = []
    for layout in ("HND", "NHD"):
        given = qkv if layout == "HND" else [x.transpose(1, 2) for x in qkv]
        session = session_of(Aim("quality", 0.3), dense_steps=0)
        outs = sampled(session, given, 3, range(1), layout=layout)
        found.append(outs if layout == "HND" else [x.transpose(1, 2) for x in outs])
        assert session.counts.reasons == {MEASURING: 1}
    assert all(map(torch.equal, *found))


def test_the_host_computes_exact_results_once_a_call(qkv: Qkv) -> None:
    session, asked = session_of(), []

    def exact() -> Tensor:
        asked.append(True)
        return scaled_dot_product_attention(*qkv)

    def fails() -> Tensor:
        asked.append(True)
        raise Unsupported("not here")

    sampled(session, qkv, 3, exact=exact)
    assert len(asked) == 2 * LAYERS, "measured or not"
    with pytest.raises(Unsupported, match="not here"):
        session_of(dense_steps=0).begin_step(0, LAYOUT, "cpu").attend(0, *qkv, exact=fails)
    assert len(asked) == 2 * LAYERS + 1


@pytest.mark.parametrize("why", ["backward", "differ in number", "meta", "192", "fewer layers"])
def test_some_calls_are_exact_in_every_step_and_counted(qkv: Qkv, why: str) -> None:
    q, k, v = (x.clone() for x in qkv)
    given = {
        "backward": (q.requires_grad_(), k, v),
        "differ in number": (q.detach(), k[:, :, :77], v[:, :, :77]),
        "meta": tuple(x.to("meta") for x in (q, k, v)),
        "192": tuple(torch.cat([x] * 3, -1) for x in qkv),  # head_dim
        "fewer layers": qkv,
    }[why]
    session = session_of(steps=3, dense_steps=0 if why == "192" else 1)
    for step in range(3):
        running = session.begin_step(step, ONE_LAYER, "cpu")
        out = running.attend(10**9 if why == "fewer layers" else 0, *given)
        running.end()
        assert why == "meta" or torch.equal(out, scaled_dot_product_attention(*given))
    (reason, *others) = reversed(session.counts.reasons)
    assert why in reason and session.counts.dense == 3
    assert others == ([MEASURING] if why == "192" else []), "it would have been measured"
    report = session.report()
    assert report.densities.overall == 1 and report.densities.of_steps.tolist() == [1, 1, 1]
    assert len(report.densities.layers) == (why != "fewer layers") and ".." not in str(report)


def test_a_device_without_kernels_is_told(qkv: Qkv, monkeypatch) -> None:
    """And serves exact attention."""
    monkeypatch.delenv("SPARGE_REFERENCE")
    for aim in (BUDGET, None):
        session = session_of(aim, even_if_slower=False)
        assert all(torch.equal(out, scaled_dot_product_attention(*qkv)) for out in
                   sampled(session, qkv, 3))  # fmt: skip
        (reason,) = session.counts.reasons
        assert "CPU is not supported" in reason and session.counts.dense == 6
        assert "SPARGE_REFERENCE=1 lets the slow reference run" in reason
        assert str(session.report()).startswith("100.0% of attention was computed; no call was")
        slow = session_of(aim)
        sampled(slow, qkv, 3)
        assert slow.counts.sparse == 2 and not slow.counts.reasons.get(reason)


def test_compiled_models_call_it_as_it_is(qkv: Qkv) -> None:
    q, k, v = qkv
    sessions = [session_of(steps=3, dense_steps=1) for _ in range(2)]
    running: list[Any] = [None, None]

    def layer(index: int, q: Tensor) -> Tensor:
        return running[index].attend(0, q * 2, k, v) + 1

    compiled = torch.compile(layer, backend="eager")
    for step in range(3):
        running[:] = [session.begin_step(step, ONE_LAYER, "cpu") for session in sessions]
        assert torch.equal(compiled(0, q), layer(1, q))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Aim("Budget", 0.5), "kind"),
        (lambda: Aim("budget", 50), "value"),
        (lambda: Aim("quality", float("nan")), "value"),
        (lambda: session_of(0.5), "Aim"),  # type: ignore[arg-type]
        (lambda: session_of(steps=6.0), "steps"),  # type: ignore[arg-type]
        (lambda: session_of(dense_steps=-1), "dense_steps"),
        (lambda: session_of(policy=0.3), "policy is 0.3; give a SparsePolicy"),
        (lambda: _begin(layout=GRID), "layout is a .*TokenGrid; give what TokenLayout.of makes"),
        (lambda: TokenLayout.of(2, SIZES), "grid is a tuple; give a TokenGrid"),
        *(
            (lambda x=x: TokenLayout.of(**{"layers": 2, x: 0.5}), f"{x} is 0.5; it takes a whole")
            for x in ("layers", "ranks")
        ),
        (lambda: grid_order(SIZES), "grid is a tuple; give a TokenGrid"),
        (lambda: grid_order(GRID, 3), "variant is 3; it takes a whole number from 0 to 2"),
        (lambda: _attend(-1), "layer"),
        (lambda: _attend(dims=3), "B, H, N, D"),
        (lambda: _attend(layout="BHND"), "HND"),
        (lambda: _attend(prompts=(0, 1)), "names 2 prompts and the batch has 1 entries"),
    ],
)
def test_arguments_of_another_kind_are_named(make: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


def _begin(**named: Any) -> Pass:
    return session_of().begin_step(**{"step": 0, "layout": LAYOUT, "device": "cpu"} | named)


def _attend(layer: int = 0, dims: int = 4, layout: str = "HND", prompts=(0,)) -> Tensor:
    x = torch.zeros((1, HEADS, GRID.tokens, 64)[-dims:])
    running = session_of().begin_step(0, LAYOUT, "cpu", prompts=prompts)
    return running.attend(layer, x, x, x, layout=layout)


@pytest.mark.parametrize("aim", [None, BUDGET], ids=["manual", "auto"])
def test_tokens_that_ranks_were_dealt_give_what_one_gets(generator, aim: Aim | None) -> None:
    """Text, then the clip with an image that lies on no grid of it, each dealt by itself."""
    grid = TokenGrid(3, 8, 12, prefix=8, tail=96)
    qkv, places, outs = neighbours_alike(grid, generator), dealt_places((8, 384), 2), []
    for ranks in (1, 2):
        session = session_of(aim, 2, 1, policy=SparsePolicy(topk=0.3))
        given = qkv if ranks == 1 else tuple(x[:, :, places] for x in qkv)
        layout = TokenLayout.of(1, grid, ranks=ranks)
        outs.append(sampled(session, given, 2, range(1), clip=layout)[1])
        assert session.counts.sparse == 1
    torch.testing.assert_close(outs[1], outs[0][:, :, places], rtol=0, atol=5e-3)


@pytest.mark.parametrize("precision", Precision)
def test_heads_are_chosen_for_the_operands_of_their_calls(qkv: Qkv, precision: Precision) -> None:
    """16-bit operands know no output scale: a call that has one is refused."""
    session = session_of(steps=2, dense_steps=1, policy=SparsePolicy(precision=precision))
    sampled(session, qkv, 2)
    assert session.counts.sparse == LAYERS
    assert heads_of(session).candidates.scaled == (precision is not Precision.SIXTEEN_BIT)


def test_models_have_heads_of_their_own_and_a_device_has_two_names(asked) -> None:
    session, x = session_of(steps=3, dense_steps=1), torch.zeros(1, HEADS, GRID.tokens, 64)
    for step, device in enumerate(("cpu:0", "cpu", "cpu:0")):
        for running in (
            session.begin_step(step, ONE_LAYER, device),
            Pass(session=session, layout=ONE_LAYER, step=Step((0,), step, model=1), device=CPU),
        ):
            running.attend(0, x, x, x)
            running.end()
    assert session.counts.reasons == {"one of the first 1 steps": 1, MEASURING: 1}
    assert session.counts.sparse == 4 and len(asked) == len(session.report().heads) == 2


def test_threads_share_a_session(asked) -> None:
    """A clip is split over devices."""
    session, devices = session_of(None, 4, 1), ("cpu", "meta")
    layout = TokenLayout.of(30, GRID)

    def run(device: str) -> None:
        x = torch.zeros(1, HEADS, GRID.tokens, 64, device=device)
        for step in range(4):
            running = session.begin_step(step, layout, device)
            for layer in range(30):
                running.attend(layer, x, x, x)
            running.end()

    threads = [threading.Thread(target=run, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = session.counts
    assert (counts.passes, counts.finished, counts.sparse, counts.dense) == (8, 8, 180, 60)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Call:
    """A call of a framework with a mask that may be padding."""
    return Call(q, k, v, mask=mask, key_mask=mask)


def exact(call: Call) -> Tensor:
    return scaled_dot_product_attention(*call.qkv, attn_mask=call.mask)


TEXT_FIRST = replace(LAYOUT, text=TextPosition.FIRST)


def served(session: Session, call: Call, step: int = 0, ends=None, **named: Any) -> Tensor:
    running = Pass(session=session, layout=TEXT_FIRST, step=Step((0,), step, **named), device=CPU)
    decision = running.decision(call)
    decision = decision if ends is None else replace(decision, ends=ends)
    out = running.serve(call, decision, Layer(0, 0), lambda: exact(call))
    running.end()
    return out


MANUAL = Settings(topk=0.6, min_tokens=64)


@pytest.mark.parametrize("mode", ["manual", "auto budget"])
def test_calls_of_one_size_may_have_other_exact_ends(qkv: Qkv, asked, mode, monkeypatch) -> None:
    session, policies = Session(replace(MANUAL, mode=mode)), []
    sparse = Call.sparse
    monkeypatch.setattr(
        Call, "sparse", lambda self, policy, *rest: policies.append(policy)
        or sparse(self, policy, *rest)
    )  # fmt: skip
    for step, ends in enumerate((None, None, (0, 0), (0, 16), None)):
        served(session, Call(*qkv), step, ends)
    found = [(policy.exact_prefix, policy.exact_suffix) for policy in policies][-4:]
    assert found == [(8, 0), (0, 0), (0, 16), (8, 0)]


def padding(real: int) -> Tensor:
    """A mask that hides what text is behind the real one."""
    mask = torch.zeros(1, 1, GRID.tokens)
    mask[..., real:8] = torch.finfo().min
    return mask


@pytest.mark.parametrize("mode", ["manual", "auto quality"])
def test_padded_text_is_left_out(qkv: Qkv, mode: str) -> None:
    session = Session(replace(MANUAL, mode=mode, quality="fast"))
    for step in range(3):
        call = masked(*qkv, padding(5))
        out = served(session, call, step, index=step, of_sparse=3)
        assert rel_l2(out, exact(call)) < 0.5
        assert rel_l2(out[:, :, 5:8], exact(call)[:, :, 5:8]) < 1e-5, "that is dense"
    assert session.counts.sparse == (3 if mode == "manual" else 2)
    assert session.counts.tokens == GRID.tokens - 3
    served(session, masked(*qkv, torch.rand(1, 1, GRID.tokens)), 3)
    assert session.counts.reasons[MASK] == 1


def test_errors_of_ours_cost_nobody_a_picture(qkv: Qkv, monkeypatch, caplog) -> None:
    def fails(*_: object) -> None:
        raise IndexError("of ours")

    monkeypatch.setattr(Call, "sparse", fails)
    session, call = Session(MANUAL), Call(*qkv)
    assert torch.equal(served(session, call), exact(call))
    assert session.counts.reasons == {FAILED: 1} and "IndexError: of ours" in caplog.text
    monkeypatch.setitem(globals(), "exact", fails)
    with pytest.raises(IndexError, match="of ours"):
        served(session, call)
    assert session.counts.dense == 1, "an error of the framework's is the framework's"


def test_dense_calls_are_in_eight_bits_where_that_is_faster(qkv: Qkv, timed) -> None:
    for eight_bit, exact_dense, expected in ((0.9, False, 2), (0.9, True, 0), (0.99, False, 0)):
        timed(replace(FAST, eight_bit=eight_bit))
        named: Any = {"even_if_slower": False, "exact_dense": exact_dense}
        session, exact = session_of(BUDGET, 3, 2, **named), scaled_dot_product_attention(*qkv)
        first = sampled(session, qkv, 2, range(1))[0]
        assert session.counts.eight_bit == expected and session.counts.dense == 2
        assert torch.equal(first, exact) == (not expected) and rel_l2(first, exact) < 0.02


@pytest.mark.parametrize(("wait", "error", "reason"), [
    (lambda: "no compiler", None, "no compiler"), (lambda: None, Unsupported("wrong"), "wrong"),
    (lambda: None, IndexError(), None), (lambda: None, None, None),
])  # fmt: skip
def test_kernels_that_are_not_there_or_wrong(asked, qkv: Qkv, monkeypatch, wait, error, reason):
    def check(*_: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(module, "check_once", check)
    ready = SimpleNamespace(usable=True, arch="", note="")
    monkeypatch.setattr(module, "capabilities", lambda device: ready)
    monkeypatch.setattr(module, "warm_up", lambda *_: SimpleNamespace(wait=lambda check: wait()))
    session = Session(MANUAL)
    session.await_kernels(CPU, Needs(), print)
    served(session, Call(*qkv))
    assert [*session.counts.reasons] == [reason] * (reason is not None)
    assert session.unusable(torch.device("meta")) is None, "a device has its own"
