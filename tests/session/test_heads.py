# SPDX-License-Identifier: Apache-2.0
"""Heads over a run: when they are measured and chosen, and what becomes of it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.metrics import rel_l2
from sparge import TokenGrid, Unsupported
from sparge.session import FAILED, Aim, Pass, Session, Settings, SigmaWindow, Step, TokenLayout
from sparge.session import heads as module
from sparge.session.choose import Curves
from sparge.session.heads import (
    ALL_EXACT,
    INF_OF_MODEL,
    MEASURING,
    NAN_OF_MODEL,
    NO_MEMORY,
    TOO_SHORT,
)
from sparge.session.measure import MeasuredCall
from sparge.session.timing import Times
from tests.session.parts import (
    BUDGET,
    CPU,
    FAST,
    GRID,
    HEADS,
    LAYOUT,
    ONE_LAYER,
    Qkv,
    heads_of,
    same_settings,
    sampled,
    session_of,
    slower,
)

pytestmark = pytest.mark.usefixtures("by_reference")

STEPS = 20
PROMPTS = {"c": (0,), "u": (1,), "d": (2,), "e": (3,), "b": (0, 1), "t": (0, 0)}
#: Filled with the number of each entry's prompt.
MARKED = torch.arange(4.0).view(4, 1, 1, 1).repeat(1, HEADS, GRID.tokens, 64)
ZERO = MARKED[:1]
FIRST = "one of the first 1 steps"


def marks(asked: Sequence[MeasuredCall]) -> str:
    """Letters of the prompts that were measured."""
    return "".join("cude"[int(call.q.flatten()[0])] for call in asked)


@pytest.mark.parametrize(
    ("dense", "passes", "measured", "sparse_from"),
    [
        # The last dense step, whatever prompts there are, and however they come.
        (4, "c0 u0 c1 u1 c2 u2 c3 u3 c4 u4", "c3 u3", "c4"),
        (4, "b0 b1 b2 b3 b4", "cu3", "b4"),
        (4, "c0 u0 d0 e0 c3 u3 d3 e3 c4", "c3 u3 d3 e3", "c4"),
        # Without a dense step the first.
        (0, "b0 b1", "cu0", "b1"),
        # Heun: at the level of the next step, and there again. DPM++ 2S: between the levels.
        (4, "b0 b1 b1 b2 b2 b3 b3 b4 b4", "cu3", "b4"),
        (4, "c0 c0.5 c1 c1.5 c2 c2.5 c3 c3.5 c4", "c3", "c4"),
        # A window that starts between two evaluations.
        (3.4, "b0 b0.5 b1 b1.5 b2 b2.5 b3 b3.5", "cu3", "b3.5"),
        # Prompts that come late or stay away, and a step that does.
        (4, "c0 u0 c3 u4 c4", "c3", "u4"),
        (4, "c0 c1 c5 u5 c6", "c5 u5", "c6"),
        # Back to more noise, and cancelled.
        (4, "b3 b1 b2 b3 b4", "cu3", "b4"),
        (4, "b0 b1", "", None),
        # Windows of context, and a prompt that is there twice: one is enough.
        (4, "c3 u3 c3 u3 c4", "c3 u3", "c4"),
        (4, "t3 t4", "c3", "t4"),
    ],
)
def test_what_is_measured(asked, dense: float, passes: str, measured: str, sparse_from) -> None:
    window = SigmaWindow(STEPS - dense if dense else math.inf, 0.0)
    levels = [float(level) for level in range(STEPS, 0, -1)]
    session, found, sparse = Session(Settings(mode="auto budget"), window, levels), [], None
    for number, name in enumerate(passes.split()):
        prompts, level = PROMPTS[name[0]], STEPS - float(name[1:])
        step = window.step(Step(prompts, number), level, levels)
        running = Pass(session=session, layout=ONE_LAYER, step=step, device=CPU)
        asked.clear()
        running.attend(0, *3 * [MARKED[list(prompts)]])
        running.end()
        if session.counts.sparse:
            sparse = name
            break
        found += [marks(asked) + name[1:]] if asked else []
    assert (" ".join(found), sparse) == (measured, sparse_from)


@pytest.mark.parametrize(
    ("before", "prompts", "blocks"),
    [
        ((), (0,), [4]), (((0,),), (0,), [8]), (((0, 1),), (0,), [4]),
        (((0,), (1,)), (1, 0), [4, 4]), (((0, 1), (2,)), (0,), [2]), ((), (0, 1, 2), [4, 4, 4]),
    ],
)  # fmt: skip
def test_prompts_of_earlier_steps_share_the_query_blocks(asked, before, prompts, blocks) -> None:
    """Where none says it, two are expected. No two look at the same block, and none at text."""
    grid, session = TokenGrid(8, 16, 16, prefix=8), session_of()
    for step, of_pass in [*((0, each) for each in before), (1, prompts)]:
        q = torch.zeros(len(of_pass), HEADS, grid.tokens, 64)
        running = session.begin_step(step, TokenLayout.of(1, grid), "cpu", prompts=of_pass)
        running.attend(0, q, q, q)
    assert [len(call.query_blocks) for call in asked] == blocks
    looked_at = [block for call in asked for block in call.query_blocks]
    assert len(set(looked_at)) == len(looked_at) and 0 not in looked_at


def test_other_draws_layers_and_times_look_at_other_blocks(asked) -> None:
    grid, seen = TokenGrid(12, 16, 16, prefix=8), []
    qkv = 3 * [torch.zeros(1, HEADS, grid.tokens, 64)]
    for draw in (0, 0, 11):
        asked.clear()
        session = session_of(steps=9, dense_steps=1, draw=draw)
        sampled(session, qkv, 9, clip=TokenLayout.of(2, grid))
        seen.append([tuple(call.query_blocks) for call in asked])
    first, same, other = seen
    assert first == same and len({*first}) == 6, "two layers, three times"
    assert not {*first} & {*other} and not {*first[0]} & {*first[2]}


@pytest.mark.parametrize(
    ("steps", "due"),
    [(1, []), (2, []), (3, [1]), (7, [3]), (8, [3, 6]), (13, [5, 10]), (16, [6, 12]),
     (40, [14, 28]), (None, [16, 32])],
)  # fmt: skip
def test_heads_are_measured_again_before_each_third(asked, steps: int | None, due) -> None:
    """Of the positive prompt, in sparse calls; never for one step alone."""
    session, measured = session_of(steps=steps and steps + 1, dense_steps=1), {}
    for step in range(1 + (steps or 50)):
        for of_pass in ((1,), (0,)):
            asked.clear()
            running = session.begin_step(step, ONE_LAYER, "cpu", prompts=of_pass)
            running.attend(0, *[MARKED[list(of_pass)]] * 3)
            if asked and step:
                measured[step - 1] = marks(asked)
    assert measured == {step - 1: "c" for step in due}
    given = [settings for settings, *_ in heads_of(session).given]
    assert [n for n in range(1, len(given)) if given[n] is not given[n - 1]] == due


def test_prompts_in_one_batch_or_one_by_one_give_the_same_bits(qkv: Qkv) -> None:
    both = tuple(torch.cat([x, x.flip(2)]) for x in qkv)
    runs = [session_of(steps=3, dense_steps=1) for _ in range(2)]
    ways = ([(0, 1)], [(0,), (1,)])
    outs = [sampled(run, both, 3, prompts=way) for run, way in zip(runs, ways, strict=True)]
    assert same_settings(*runs) and all(map(torch.equal, *outs))


@pytest.mark.parametrize("aim", [BUDGET, Aim("quality", 0.3)], ids=str)
def test_no_clock_has_a_say(qkv: Qkv, timed, monkeypatch, aim: Aim) -> None:
    """Where all seconds are ten times as many heads get the same bits, and on a GPU that was not
    timed; sparse calls are faster in all of them."""
    runs, outs, measured = [], [], replace(FAST, measuring=0.02)
    for times, tick in ((measured, 1.0), (slower(measured, 10), 10.0), (None, 1.0)):
        timed(times)
        clock = count(0.0, tick)
        monkeypatch.setattr(time, "perf_counter", lambda clock=clock: next(clock))
        runs.append(session_of(aim, 9, 1, even_if_slower=False, exact_dense=True))
        outs.append(sampled(runs[-1], qkv, 9, range(1)))
    for run, out in zip(runs, outs, strict=True):
        assert run.counts.sparse == 8 and run.counts.reasons == {FIRST: 1}
        assert same_settings(runs[0], run) and all(map(torch.equal, out, outs[0]))
    assert len({id(given) for given, *_ in heads_of(runs[0]).given}) == 3, "chosen three times"


def test_what_sparse_calls_err_is_expected_and_found(qkv: Qkv) -> None:
    session = session_of(Aim("quality", 0.4), 9, 1)
    outs, exact = sampled(session, qkv, 9), scaled_dot_product_attention(*qkv)
    (heads,) = session.report().heads
    assert heads.layers == [0, 1] and heads.density.shape == heads.found.shape == (2, HEADS)
    err = torch.tensor([rel_l2(outs[6][0, h, 8:], exact[0, h, 8:]) for h in range(HEADS)])
    for told in (heads.found[1], heads.expected[1]):
        assert (err > 0.05).all() and torch.allclose(told, err, rtol=0.15)
    error = session.report().error
    assert error == pytest.approx(float((heads.found * heads.weight).mean()), rel=1e-5)
    assert error is not None and 0.2 < error < 1.2 * 0.4


@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_layer_that_comes_later_is_dense_once(asked, at: int) -> None:
    session = session_of(steps=9, dense_steps=1)
    for step in range(9):
        running, told = session.begin_step(step, LAYOUT, "cpu"), session.counts.reasons[MEASURING]
        for layer in range(1 + (step > at)):
            running.attend(layer, ZERO, ZERO, ZERO)
        assert session.counts.reasons[MEASURING] == told + (step == at + 1)
    assert session.counts.reasons == {FIRST: 1, MEASURING: 1}
    (heads,) = session.report().heads
    assert heads.layers == [0, 1] and heads.density.isfinite().all()


def test_a_choice_that_was_interrupted_is_made_in_the_next_step(asked, monkeypatch) -> None:
    session, chosen, tries = session_of(), Curves.chosen, []

    def interrupted_once(*args, **named):
        tries.append(args)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return chosen(*args, **named)

    monkeypatch.setattr(Curves, "chosen", interrupted_once)
    for step in range(6):
        try:
            session.begin_step(step, ONE_LAYER, "cpu").attend(0, ZERO, ZERO, ZERO)
        except KeyboardInterrupt:
            assert step == 2
    assert len(tries) == 3 and session.counts.sparse == 3


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Unsupported("no"), "no"), (torch.OutOfMemoryError(), NO_MEMORY), (IndexError(), FAILED)],
)
def test_a_layer_that_cannot_be_measured_stays_dense(asked, monkeypatch, error, reason) -> None:
    """The other is sparse. Errors of ours are the caller's to see, once."""
    session, raised, measured = session_of(), 0, module.measure

    def measure(call: MeasuredCall, with_truth: bool = False):
        if marks([call]) == "u":
            raise error
        return measured(call, with_truth)

    monkeypatch.setattr(module, "measure", measure)
    for step in range(6):
        running = session.begin_step(step, LAYOUT, "cpu")
        for layer in range(2):
            try:
                running.attend(layer, *3 * [MARKED[layer : layer + 1]])
            except IndexError:
                raised += 1
    assert raised == (reason == FAILED) and session.counts.sparse == 4
    assert session.counts.reasons == {"one of the first 2 steps": 4 - raised, reason: 4}


def test_without_memory_to_measure_again_settings_go_on(asked, monkeypatch) -> None:
    session, measured = session_of(steps=9, dense_steps=1), module.measure

    def full(call: MeasuredCall, with_truth: bool = False):
        if with_truth:
            raise torch.OutOfMemoryError
        return measured(call)

    monkeypatch.setattr(module, "measure", full)
    sampled(session, 3 * [ZERO], 9)
    (heads,) = session.report().heads
    assert session.counts.sparse == 16 and heads.found.isnan().all()
    assert session.report().error == pytest.approx(float((heads.expected * heads.weight).mean()))


@pytest.mark.parametrize(("value", "reason"), [(math.nan, NAN_OF_MODEL), (math.inf, INF_OF_MODEL)])
def test_a_layer_whose_model_gives_no_numbers_stays_dense(qkv: Qkv, value, reason) -> None:
    """Where it gives some later, in a step that is measured again, nothing is spoilt."""
    session, (q, k, v) = session_of(steps=9, dense_steps=1), qkv
    broken = v.clone()
    broken[..., -1, 3] = value
    for step in range(9):
        running = session.begin_step(step, LAYOUT, "cpu")
        running.attend(0, q, k, broken if step == 6 else v)
        running.attend(1, q, k, broken)
        running.end()
    assert session.counts.reasons == {FIRST: 2, reason: 8} and session.counts.sparse == 8
    assert all(given.density.isfinite().all() for given, *_ in heads_of(session).given)


def test_text_alone_has_nothing_to_drop(asked) -> None:
    session, q = session_of(dense_steps=0), torch.zeros(1, HEADS, 305, 64)
    text = TokenLayout.of(1, TokenGrid(1, 1, 5, prefix=300))
    sampled(session, (q, q, q), 3, range(1), clip=text)
    assert session.counts.reasons == {ALL_EXACT: 3} and not asked


LEAST = "at 392 tokens sparse is faster only below {} % density"


@pytest.mark.parametrize(
    ("times", "steps", "reasons"),
    [
        (FAST, 3, {}),
        (None, 3, {}),
        (replace(FAST, sparse_fixed=2.0), 3, {"at 392 tokens sparse would be slower": 2}),
        (replace(FAST, sparse_pairs=4.0), 3, {LEAST.format(24): 2}),  # what is forced takes more
        (replace(FAST, measuring=0.24), 2, {}),  # a sparse step saves 0.74, all measuring takes 3
        (replace(FAST, measuring=0.26), 2, {TOO_SHORT: 1}),
        (replace(FAST, measuring=0.26), 3, {}),
    ],
)
def test_measuring_has_to_pay(asked, timed, times: Times | None, steps: int, reasons) -> None:
    timed(times)
    session = session_of(BUDGET, steps, 1, even_if_slower=False)
    sampled(session, 3 * [ZERO], steps, range(1))
    assert session.counts.reasons == Counter({FIRST: 1}) + Counter(reasons)
    assert bool(asked) == (not reasons)


def test_a_layer_of_too_much_density_is_dense_and_the_other_sparse(qkv: Qkv, timed) -> None:
    timed(replace(FAST, sparse_pairs=1.3))
    session, (q, k, v) = session_of(Aim("budget", 0.7), 3, 1, even_if_slower=False), qkv
    for step in range(3):
        running = session.begin_step(step, LAYOUT, "cpu")
        running.attend(0, q, k, v)
        running.attend(1, 0.01 * q, k, 0.1 * v)  # flat, and of little weight
        running.end()
    first, second = heads_of(session).given[0][0].kept[0].mean(1).tolist()
    assert first > 0.74 > second and session.report().heads[0].layers == [1]
    assert session.counts.reasons == {FIRST: 2, LEAST.format(74): 2}
