# SPDX-License-Identifier: Apache-2.0
"""Overrides of other nodes: when they are compared, and what then becomes of calls."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch

from tests.comfy.overrides import MEANINGS, backend, only_where, override_of, temperature
from tests.nodes.conftest import backend as dense_of
from tests.nodes.parts import BLOCKS, EIGHT_BIT, relative_error

pytestmark = pytest.mark.usefixtures("reference_allowed")

KEY = "optimized_attention_override"
CHANGES = "another node changes this attention"
CHECKING = "checking another node's attention"
ALL = {"topk": 1.0, "start_percent": 0.0}
#: Noise levels of runs in which every step may be sparse.
LEVELS = [0.9 - 0.05 * step for step in range(14)]


def setting(override):
    """Puts an override over ours."""
    return lambda patched: patched.transformer_options.update({KEY: override})


def assert_given(got, override, step, error=0.0):
    """Every step gave what it gives without our node, within a relative error."""

    def attend(q, k, v, heads, **kwargs):
        q, k, v = (torch.cat([x] * 2) for x in (q, k, v))
        return override(dense_of, q, k, v, heads, **kwargs)

    for given in got.given:
        for found, expected in zip(given, step(attend), strict=True):
            assert relative_error(found, expected) <= error


def test_a_plain_one_is_passed_by_when_it_is_known(sampled, step):
    """In the first step each layer tells, then one layer in every sixth."""
    calls = []

    def theirs(func, *args, **kwargs):
        calls.append(True)
        return func(*args, **kwargs)

    got = sampled(step, LEVELS, prepared=setting(theirs), **ALL)
    assert got.counts.reasons == {CHECKING: BLOCKS + 2} and len(calls) == BLOCKS + 2
    assert got.counts.sparse == len(LEVELS) * BLOCKS - len(calls)
    assert got.run.override_checks._checks  # nothing of it outlives the run


@pytest.mark.parametrize("meaning", sorted(MEANINGS.keys() - {"gain of one prompt"}))
@pytest.mark.parametrize("widgets", [ALL, {"mode": "auto budget", "topk": 1.0}], ids=str)
def test_a_meaning_is_kept(sampled, step, meaning, widgets):
    override = override_of(MEANINGS[meaning])
    got = sampled(step, LEVELS[:4], prepared=setting(override), **widgets)
    assert got.counts.sparse == 0 and got.counts.reasons[CHANGES] == 3 * BLOCKS
    assert_given(got, override, step)


def telling(step, levels):
    """The step, whose calls say their level and block."""
    left = list(levels)

    def told(attend):
        blocks, attend.options["level"] = itertools.count(), left.pop(0)

        def of_block(*args):
            attend.options["block_index"] = next(blocks)
            return attend(*args)

        return step(of_block)

    return told


def test_what_one_prompt_shows_holds_for_the_other(sampled, step):
    override = override_of(MEANINGS["gain of one prompt"])
    prompts = ([1], [0])  # a pass each, the one without a gain last
    got = sampled(step, LEVELS[:4], prepared=setting(override), conditionings=prompts, **ALL)
    assert got.counts.reasons == {CHECKING: 2 * BLOCKS, CHANGES: 3 * 2 * BLOCKS}


def test_the_last_dense_step_tells_once_more(sampled, step):
    levels = [0.95, 0.9, *LEVELS[4:8]]
    begins = only_where(temperature, lambda options: options["level"] < 0.93)
    got = sampled(telling(step, levels), levels, prepared=setting(override_of(begins)), topk=1.0)
    assert got.counts.reasons == {"before start_percent 0.2": 2 * BLOCKS, CHANGES: 4 * BLOCKS}


def test_the_first_dense_step_tells(sampled, step):
    got = sampled(step, [0.9, *LEVELS[4:]], prepared=setting(override_of(backend)), topk=1.0)
    assert got.counts.reasons == {"before start_percent 0.2": BLOCKS, CHECKING: 1}


def test_a_prompt_that_comes_later_tells_for_itself(session, patch, runs, step):
    """Some guiders leave the negative prompt out at first."""

    class Session(session):
        def forward(self, step, sigma, conditionings):
            return super().forward(step, sigma, [0] if sigma > LEVELS[3] else conditionings)

    patched = patch(**ALL)
    setting(override_of(backend))(patched)
    Session(patched).sample(step, LEVELS[:6])
    ((run, _),) = runs
    assert run.counts.reasons == {CHECKING: 2 * BLOCKS}


@pytest.mark.parametrize("blocks", [(0, 1), (1,)])
def test_one_that_begins_to_act_is_found_and_every_layer_tells_again(sampled, step, blocks):
    def acts(options):
        return options["level"] < 0.58 and options["block_index"] in blocks

    begins = setting(override_of(only_where(temperature, acts)))
    got = sampled(telling(step, LEVELS), LEVELS, prepared=begins, **ALL)
    reasons = got.counts.reasons
    # From step 7 on it acts, which the second layer tells in step 11, as it is its turn; the first
    # one in the step after.
    assert reasons == {CHECKING: BLOCKS + 1 + 1 + 1, CHANGES: 2 + (0 in blocks)}
    assert got.counts.sparse == len(LEVELS) * BLOCKS - reasons.total()


def test_one_that_overwrites_ours_in_each_pass_by_a_new_function_stays_the_dense_path(
    sampled, step
):
    """A node that wraps passes outside of ours. Nothing is known of a function that is new."""
    theirs = override_of(temperature)

    def wrapper(executor, x, t, context, text, control, options, **kwargs):
        new = options | {KEY: functools.partial(theirs)}
        return executor(x, t, context, text, control, new, **kwargs)

    def wrapping(patched):
        patched.add_wrapper_with_key("apply_model", "another node", wrapper)

    got = sampled(step, LEVELS[:4], prepared=wrapping, **ALL)
    assert got.counts.reasons == {CHECKING: 4 * BLOCKS}
    assert_given(got, theirs, step)


def test_one_that_comes_between_two_runs_is_noticed(patch, session, runs, step):
    patched = patch(**ALL)
    ours = patched.transformer_options[KEY]
    for override in (ours, override_of(temperature), ours):
        setting(override)(patched)
        session(patched).sample(step, LEVELS[:4])
    assert [run.counts.sparse for run, _ in runs] == [4 * BLOCKS, 0, 4 * BLOCKS]


def test_reading_waits_once_a_step_and_only_after_a_comparison(sampled, step, monkeypatch):
    reads, original = [], torch.Tensor.tolist

    def tolist(tensor):
        if tensor.dtype == torch.float32 and tensor.ndim == 1 and len(tensor) > 2:
            reads.append(len(tensor))
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    counts = []
    for prepared in (lambda patched: None, setting(override_of(backend))):
        reads.clear()
        sampled(step, LEVELS, prepared=prepared, conditionings=([0], [1]), **ALL)
        counts.append(len(reads))
    assert counts[1] - counts[0] == 3, "after the first step, and after two more"


def test_a_result_of_another_shape_is_a_change(sampled, step):
    def theirs(func, *args, **kwargs):
        return func(*args, **kwargs)[:, :, :64]

    got = sampled(step, LEVELS[:3], prepared=setting(theirs), **ALL)
    assert got.counts.reasons == {CHECKING: BLOCKS, CHANGES: 2 * BLOCKS}


@pytest.mark.parametrize("error", [RuntimeError("a bug"), torch.OutOfMemoryError("no room")])
def test_without_a_comparison_calls_stay_dense(
    sampled, step, load_pack, monkeypatch, error, caplog
):
    def fail(*_):
        raise error

    monkeypatch.setattr(load_pack("nodes.override_check"), "_attended", fail)
    got = sampled(step, LEVELS[:3], prepared=setting(override_of(backend)), **ALL)
    assert got.counts.reasons == {CHECKING: 3 * BLOCKS}
    assert ("a bug" in caplog.text) == ("a bug" in str(error))


def sol_attn(q, k, v):
    raise AssertionError("nobody calls it")


def _with_sol(attend, *args, **kwargs):
    return sol_attn(*args) if kwargs.get("never") else attend(*args, **kwargs)


class _Sol:
    def __call__(self, func, *args, **kwargs):
        return sol_attn(*args) if kwargs.get("never") else func(*args)


def test_approximations_are_known_by_the_names_in_their_code(load_pack):
    approximates = load_pack("nodes.override_check").approximates
    inner = functools.partial(_with_sol, None)
    known = [_with_sol, _Sol(), lambda *a, **k: inner(*a, **k), functools.partial(_Sol())]
    assert all(map(approximates, known))
    assert not any(map(approximates, [override_of(temperature), dense_of, torch.nn.Identity()]))


def test_copies_of_options_are_of_the_same_run(sampled, step):
    """As packs make them of a model, and of the conditioning of a pass."""
    seen = []

    def copying(attend):
        run = attend.options["sparge_run"]
        copied = copy.deepcopy(dict(attend.options))
        assert copied["sparge_run"] is run and copied[KEY] is attend.options[KEY]
        assert copied["sparge_forward"] is attend.options["sparge_forward"]
        assert copy.deepcopy(run.owner) is run.owner
        seen.append(True)
        return step(attend)

    def copied(patched):
        patched.model_options = copy.deepcopy(patched.model_options)

    for widgets in (ALL, {"mode": "auto quality"}, {"mode": "auto budget"}):
        assert sampled(copying, LEVELS[:3], prepared=copied, **widgets).counts.sparse > 0
    assert len(seen) == 9


def test_ours_under_an_override_with_a_meaning_serves_it_sparse(sampled, step):
    def chained(patched):
        options = patched.transformer_options
        options[KEY] = override_of(temperature, options[KEY])

    got = sampled(step, LEVELS[:3], prepared=chained, **ALL)
    assert got.counts.sparse == 3 * BLOCKS
    assert_given(got, override_of(temperature), step, 5 * EIGHT_BIT)
