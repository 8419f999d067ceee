# SPDX-License-Identifier: Apache-2.0
"""The life of a run: install, sample, chain, replace, report, forget."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace

import pytest
import torch

from tests.nodes.parts import HEADS, LATENT, TOKENS

pytestmark = pytest.mark.usefixtures("reference_allowed")

KEY = "optimized_attention_override"


@pytest.fixture
def step(generator):
    """One forward pass: a long self-attention, a short one, a cross-attention, a masked one."""
    q = torch.randn(1, TOKENS, HEADS * 64, generator=generator)

    def forward(attend):
        out = attend(q, q, q, HEADS)
        attend(q[:, :64], q[:, :64], q[:, :64], HEADS)
        attend(q, q[:, :77], q[:, :77], HEADS)
        attend(q, q, q, HEADS, mask=torch.zeros(TOKENS, TOKENS))
        return out

    return forward


@pytest.fixture
def run(sampled, step):
    """run(sigmas, ...): a run of a model that the pack does not know, with 77 tokens of text."""
    context = torch.zeros(1, 77, 8)
    return lambda sigmas=(0.5,), model=None, **given: sampled(
        given.pop("step", step), sigmas, model or torch.nn.Module(), context=context, **given
    )


def test_what_the_node_leaves_on_a_model(patch, patcher):
    patched = patch()
    assert patcher.transformer_options == {} and patcher.wrappers == {}
    assert set(patched.wrappers) == {"outer_sample", "predict_noise", "apply_model"}
    override, q = patched.transformer_options[KEY], torch.randn(1, TOKENS, 64)
    assert not hasattr(override, "container_function"), "it changes how ComfyUI calls it"
    outside_a_run = override(lambda *_, **__: "dense", q, q, q, 1, transformer_options={})
    assert outside_a_run == "dense"


def test_a_second_node_replaces_the_first(load_pack, patch, patcher, session, step, runs):
    def earlier(func, *args, **kwargs):
        return func(*args, **kwargs)

    patcher.transformer_options[KEY] = earlier
    node = load_pack("nodes.sparge_attention").SpargeAttention
    second = node.execute(patch(topk=0.9), topk=0.1, min_tokens=TOKENS)[0]
    assert [len(keyed["sparge_attention"]) for keyed in second.wrappers.values()] == [1, 1, 1]
    assert second.transformer_options[KEY].__sparge__.previous is earlier
    session(second).sample(step, [0.5])
    ((run, _),) = runs
    assert run.settings.topk == 0.1


def spoil(override):
    """A later pack's override that calls ours first and returns something of its own."""

    def outer(func, *args, **kwargs):
        return override(func, *args, **kwargs) + 1

    return outer


class Chained:
    def __init__(self, previous):
        self.previous = previous

    def call(self, func, *args, **kwargs):
        return self.previous(func, *args, **kwargs)

    __call__ = call


class Knowing(Chained):
    def __init__(self, previous):
        super().__init__(previous)
        self.itself = self


def of_state(state):
    return lambda func, *args, **kwargs: state.previous(func, *args, **kwargs)


CHAINS = {
    "closure": spoil,
    "partial": lambda override: functools.partial(lambda prev, *a, **k: prev(*a, **k), override),
    "bound method": lambda override: Chained(override).call,
    "callable object": lambda override: Chained(override),
    "state object in a closure": lambda override: of_state(Chained(override)),
    "twice": lambda override: spoil(spoil(override)),
    "object that knows itself": lambda override: Knowing(override),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_node_that_chains_ours_stays_outside(run, step, chain):
    theirs, seen = [], []

    def chained(patched):
        theirs.append(chain(patched.transformer_options[KEY]))
        patched.transformer_options[KEY] = theirs[0]

    def looking(attend):
        seen.append(attend.options[KEY])
        step(attend)

    assert run(step=looking, prepared=chained).counts.sparse == 1
    assert seen == theirs


def test_a_node_that_overwrites_ours_becomes_the_dense_path(
    load_pack, patch, session, step, runs, monkeypatch
):
    library = load_pack("sparge.session.calls")
    monkeypatch.setattr(library, "attention", lambda q, k, v, policy, **kwargs: q)
    patched, served, in_use = patch(), [], []

    def theirs(func, *args, **kwargs):
        served.append(args[0].shape[1])
        return func(*args, **kwargs)

    def looking(attend):
        in_use.append(attend.options[KEY])
        step(attend)

    patched.transformer_options[KEY] = theirs
    running = session(patched)
    for _ in range(2):
        running.sample(looking, [0.5] * 250)
    compared = 1 + 250 // 6  # at first, and in every sixth step
    assert [run.counts.sparse for run, _ in runs] == [250 - compared] * 2
    assert len(served) == 2 * (250 * 3 + compared)
    assert len({id(override) for override in in_use}) == 1  # a new one would make models recompile
    assert in_use[0].__sparge__.previous is theirs is running.options[KEY]


def test_a_dense_path_that_leads_back_ends(run):
    """A pack that keeps ours where nobody looks, and calls it."""

    def hide(patched):
        hidden = {"previous": patched.transformer_options[KEY]}
        patched.transformer_options[KEY] = lambda func, *args, **kwargs: hidden["previous"](
            func, *args, **kwargs
        )

    counts = run([0.9, 0.5], prepared=hide).counts
    assert (counts.sparse, counts.calls) == (1, 8)


def test_comfyuis_own_sparse_node_on_the_same_model_is_named(run):
    callbacks = {"on_prepare_state": {"block_sparse_attention": [print]}}
    got = run(prepared=lambda patched: patched.transformer_options.update(callbacks=callbacks))
    assert "Model Sparse Attention is on the same model" in got.line


@pytest.mark.parametrize("mode", ["manual", "auto quality"])
def test_cancel_leaves_a_report_and_nothing_else(session, patch, runs, step, mode):
    class Cancelled(BaseException):
        """Exception like ComfyUI's own, which is not an Exception."""

    levels, sigmas = [], [0.9, 0.6, 0.5, 0.4]

    def cancelled(attend):
        levels.append(True)
        if len(levels) == 3:
            raise Cancelled
        return step(attend)

    running = session(patch(mode=mode), LATENT)
    before = dict(running.patcher.transformer_options)
    whole = running.sample(step, sigmas)
    assert running.options == before
    with pytest.raises(Cancelled):
        running.sample(cancelled, sigmas)
    assert running.options == before == running.patcher.transformer_options
    again = running.sample(step, sigmas)
    assert [stopped for _, stopped in runs] == [False, True, False]
    assert [run.counts.sparse for run, _ in runs] == [3, 1, 3]
    assert all(map(torch.equal, whole, again))
    first, _, last = (run.report() for run, _ in [*runs])
    assert torch.equal(first.densities.by_step, last.densities.by_step)


def test_a_failing_report_does_not_hide_the_result(load_pack, run, monkeypatch):
    def fail(*args):
        raise RuntimeError("no report")

    monkeypatch.setattr(load_pack("nodes.comfyui"), "publish", fail)
    assert run().given[0].shape == (2, TOKENS, HEADS * 64)


def test_two_runs_at_once_do_not_mix(patch, session, step, runs):
    """They run as two GPUs of one run do, or a sampler inside a sampler."""
    patched, results = patch(topk=0.5), []

    def sample():
        results.append(session(patched, LATENT).sample(step, [0.5] * 5))

    threads = [threading.Thread(target=sample) for _ in range(4)]
    sample()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.counts.sparse for run, _ in runs] == [5] * 5
    expected, *others = map(torch.stack, results)
    assert all(torch.equal(got, expected) for got in others)


def test_one_forward_at_a_time_waits_for_the_gpu(patch, session, step, monkeypatch):
    """sigma is read once a pass, and not at all when the window is everything."""
    reads, original = [], torch.tensor

    class Sigma(torch.Tensor):
        def __float__(self):
            reads.append(1)
            return super().__float__()

    patched = patch(), patch(start_percent=0.0)
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: original(*a, **k).as_subclass(Sigma))
    for each in patched:
        session(each).sample(step, [0.5, 0.4])
        assert len(reads) == 2


def test_without_a_gpu_everything_stays_dense_and_the_line_says_why(load_pack, run, monkeypatch):
    """The machine is named before widgets."""
    monkeypatch.delenv("SPARGE_REFERENCE")
    got = run(start_percent=1.0, min_tokens=1 << 20)
    assert (got.counts.sparse, got.counts.dense) == (0, 3)
    assert load_pack("sparge.session").verdict(got.last)[0].endswith(("NVIDIA GPU", "CPU alone"))
    assert "min_tokens" not in got.line and "start_percent" not in got.line


def test_a_node_that_another_replaced_says_so(load_pack, session, patcher, step, monkeypatch):
    """The first two of three nodes in a chain say it, each time that the last one runs."""
    node, told = load_pack("nodes.sparge_attention").SpargeAttention, {}
    monkeypatch.setattr(load_pack("nodes.comfyui"), "show_on_node", told.__setitem__)
    for place in "123":
        monkeypatch.setattr(node, "hidden", SimpleNamespace(unique_id=place))
        patcher = node.execute(patcher)[0]
    for _ in range(2):
        told.clear()
        session(patcher).sample(step, [0.5])
        assert told.pop("1") == told.pop("2") == "Replaced by the Sparge Attention after it"
        assert told.pop("3").startswith("Nothing skipped: too small (256 of 4096)\n")
