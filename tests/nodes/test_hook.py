# SPDX-License-Identifier: Apache-2.0
"""The life of a run: install, sample, chain, replace, report, forget."""

from __future__ import annotations

import functools
import gc
import threading
import weakref

import pytest
import torch

pytestmark = pytest.mark.usefixtures("reference_allowed")

TOKENS, HEADS = 256, 2


@pytest.fixture
def patch(load_pack):
    def patched(patcher, **widgets):
        node = load_pack("nodes.sparge_attention").SpargeAttention
        return node.execute(patcher, **({"min_tokens": TOKENS} | widgets))[0]

    return patched


@pytest.fixture
def published(runs):
    return runs


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
def instant_library(load_pack, monkeypatch):
    """Library in place of the reference, where only who is called counts."""
    monkeypatch.setattr(
        load_pack("sparge.tune.call"), "attention", lambda q, k, v, policy, **kwargs: q
    )


def spoil(override):
    """A later pack's override that calls ours first and returns something of its own."""

    def outer(func, *args, **kwargs):
        return override(func, *args, **kwargs) + 1

    return outer


def test_the_model_that_goes_in_is_untouched(patch, patcher):
    patched = patch(patcher)
    assert patcher.transformer_options == {} and patcher.wrappers == {}
    assert set(patched.wrappers) == {"outer_sample", "predict_noise", "apply_model"}


def test_counts_and_reasons(patch, patcher, session, step, published):
    session(patch(patcher)).sample(step, [1.0, 0.8, 0.5])
    ((run, stopped),) = published
    assert not stopped
    assert (run.tally.sparse, run.tally.cross, run.tally.forwards) == (2, 3, 3)
    assert run.tally.reasons == {
        "before start_percent 0.2": 1,
        f"fewer than min_tokens ({TOKENS}) tokens": 3,
        "attention mask": 3,
    }


def test_outside_a_run_the_override_hands_on(patch, patcher, step):
    override = patch(patcher).transformer_options["optimized_attention_override"]
    q = torch.randn(1, TOKENS, 64)
    out = override(lambda *args, **kwargs: "dense", q, q, q, 1, transformer_options={})
    assert out == "dense"


def test_no_attribute_that_changes_how_comfyui_calls_it(patch, patcher):
    override = patch(patcher).transformer_options["optimized_attention_override"]
    assert not hasattr(override, "container_function")


def test_a_second_node_replaces_the_first(load_pack, patch, patcher, session, step, published):
    def earlier(func, *args, **kwargs):
        return func(*args, **kwargs)

    patcher.transformer_options["optimized_attention_override"] = earlier
    first = patch(patcher, topk=0.9)
    second = patch(first, topk=0.1)
    assert [len(keyed["sparge_attention"]) for keyed in second.wrappers.values()] == [1, 1, 1]
    mark = second.transformer_options["optimized_attention_override"].__sparge__
    assert mark.previous is earlier
    session(second).sample(step, [0.5])
    ((run, _),) = published
    assert run.settings.topk == 0.1


CHAINS = {
    "closure": spoil,
    "partial": lambda override: functools.partial(lambda prev, *a, **k: prev(*a, **k), override),
    "bound method": lambda override: Chained(override).call,
    "callable object": lambda override: Chained(override),
    "state object in a closure": lambda override: of_state(Chained(override)),
    "twice": lambda override: spoil(spoil(override)),
}


class Chained:
    def __init__(self, previous):
        self.previous = previous

    def call(self, func, *args, **kwargs):
        return self.previous(func, *args, **kwargs)

    __call__ = call


def of_state(state):
    return lambda func, *args, **kwargs: state.previous(func, *args, **kwargs)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_node_that_chains_ours_stays_outside(patch, patcher, session, step, published, chain):
    patched = patch(patcher)
    options = patched.transformer_options
    theirs = options["optimized_attention_override"] = chain(
        options["optimized_attention_override"]
    )
    running = session(patched)
    seen = []
    running.sample(
        lambda attend: (seen.append(running.options["optimized_attention_override"]), step(attend)),
        [0.5],
    )
    assert seen == [theirs]
    assert published[0][0].tally.sparse == 1


def test_a_node_that_overwrites_ours_becomes_the_dense_path(
    patch, patcher, session, step, published, instant_library
):
    patched = patch(patcher)
    served = []

    def theirs(func, *args, **kwargs):
        served.append(args[0].shape[1])
        return func(*args, **kwargs)

    patched.transformer_options["optimized_attention_override"] = theirs
    running = session(patched)
    in_use = []
    for _ in range(2):
        running.sample(
            lambda attend: (
                in_use.append(running.options["optimized_attention_override"]),
                step(attend),
            ),
            [0.5] * 250,
        )
    assert [run.tally.sparse for run, _ in published] == [250, 250]
    assert len(served) == 2 * 250 * 3
    assert len({id(override) for override in in_use}) == 1  # a new one would make models recompile
    assert in_use[0].__sparge__.previous is theirs
    assert running.options["optimized_attention_override"] is theirs


def test_a_dense_path_that_leads_back_ends(patch, patcher, session, step, published):
    """A pack that keeps ours where nobody looks, and calls it."""
    patched = patch(patcher)
    hidden = {"previous": patched.transformer_options["optimized_attention_override"]}
    patched.transformer_options["optimized_attention_override"] = lambda func, *args, **kwargs: (
        hidden["previous"](func, *args, **kwargs)
    )
    session(patched).sample(step, [0.5])
    tally = published[0][0].tally
    assert (tally.sparse, tally.calls) == (1, 4)


def test_nothing_outlives_a_run(patch, patcher, session, step, published):
    patched = patch(patcher)
    before = dict(patched.transformer_options)
    running = session(patched)
    running.sample(step, [0.5])
    assert running.options == before == patched.transformer_options
    run = weakref.ref(published[0][0])
    published.clear()
    gc.collect()
    assert run() is None


def test_an_error_passes_through_and_is_reported(patch, patcher, session, published):
    class Cancelled(BaseException):
        """Exception like ComfyUI's own, which is not an Exception."""

    def cancel(attend):
        raise Cancelled

    patched = patch(patcher)
    running = session(patched)
    with pytest.raises(Cancelled):
        running.sample(cancel, [0.5])
    ((_, stopped),) = published
    assert stopped
    assert set(running.options) == {"optimized_attention_override"}


def test_a_failing_report_does_not_hide_the_result(
    load_pack, patch, patcher, session, step, monkeypatch
):
    def fail(*args):
        raise RuntimeError("no report")

    monkeypatch.setattr(load_pack("nodes.report"), "publish", fail)
    assert session(patch(patcher)).sample(step, [0.5])[0].shape == (2, TOKENS, HEADS * 64)


def test_two_runs_at_once_do_not_mix(patch, patcher, session, step, published):
    """They run as two GPUs of one run do, or a sampler inside a sampler."""
    patched = patch(patcher, topk=0.5)
    expected = session(patched).sample(step, [0.5] * 5)
    published.clear()
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(session(patched).sample(step, [0.5] * 5)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.tally.sparse for run, _ in published] == [5] * 4
    assert all(torch.equal(a, b) for got in results for a, b in zip(got, expected, strict=True))


def test_one_forward_at_a_time_waits_for_the_gpu(load_pack, patch, patcher, session, step):
    """sigma is read once a pass, and not at all when the window is everything."""
    reads = []

    class Sigma(torch.Tensor):
        def __float__(self):
            reads.append(1)
            return super().__float__()

    original = torch.tensor
    patched = patch(patcher)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch, "tensor", lambda *a, **k: original(*a, **k).as_subclass(Sigma))
        session(patched).sample(step, [0.5, 0.4])
        assert len(reads) == 2
        session(patch(patcher, start_percent=0.0)).sample(step, [0.5, 0.4])
        assert len(reads) == 2


def test_dense_without_a_usable_device(
    patch, patcher, session, step, published, reference_forbidden
):
    session(patch(patcher)).sample(step, [0.5])
    ((run, _),) = published
    assert run.tally.sparse == 0
    assert any("cpu" in reason.lower() or "NVIDIA" in reason for reason in run.tally.reasons)


def test_a_block_that_the_model_lacks_is_named(patch, patcher, session, step, published):
    network = torch.nn.Module()
    network.blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    model = type(patcher)(network)
    session(patch(model, dense_blocks="0-3, -4, -1")).sample(step, [0.5])
    session(patch(model, dense_blocks="0-2, -3")).sample(step, [0.5])
    first, second = (run.notes for run, _ in published)
    assert first == ["dense_blocks names -4, 3; this model has blocks 0-2"]
    assert second == []


def test_an_installed_library_beside_the_pack_changes_nothing(load_pack, monkeypatch, make_qkv):
    """Copies may differ in version; and what the pack's ops raise, the pack must know."""
    import sparge

    ours = load_pack("sparge")
    q, k, v = make_qkv(1, 2, 200, 64)
    assert torch.equal(ours.attention(q, k, v), sparge.attention(q, k, v))

    def refuse(*_):
        raise ours.Unsupported("the test allows nothing")

    monkeypatch.setattr(load_pack("sparge.stages.on_reference"), "compute", refuse)
    with pytest.raises(ours.Unsupported):
        ours.attention(q, k, v)
    sparge.attention(q, k, v)
