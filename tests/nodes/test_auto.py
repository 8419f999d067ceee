# SPDX-License-Identifier: Apache-2.0
"""Runs in auto modes: what is measured, when heads are chosen, what sparse calls are given."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter

import pytest
import torch

pytestmark = pytest.mark.usefixtures("reference_allowed")

HEADS, BLOCKS = 2, 2
LATENT = (4, 16, 16)
TOKENS = 4 * 8 * 8
DENSE_THEN_SPARSE = [1.0, 0.9, 0.7, 0.6, 0.5]


class WanModel(torch.nn.Module):
    """Part of Wan that the node sees; its name makes it one."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_size, self.num_heads, self.blocks = (1, 2, 2), HEADS, [0] * BLOCKS
        self.norm = torch.nn.LayerNorm(8)


@pytest.fixture
def patch(load_pack, patcher):
    """patch(model, **widgets): a patched patcher."""

    def patched(model=None, mode="auto quality", **widgets):
        patcher.model.diffusion_model = model or WanModel()
        node = load_pack("nodes.sparge_attention").SpargeAttention
        return node.execute(patcher, mode=mode, **({"min_tokens": TOKENS} | widgets))[0]

    return patched


@pytest.fixture
def step(generator):
    """A forward pass: a long self-attention in each block, of keys that are alike in space."""
    drift = torch.linspace(0, 30, TOKENS)[None, :, None] + torch.arange(HEADS * 64)
    layers = [
        tuple(torch.randn(1, TOKENS, HEADS * 64, generator=generator) for _ in "qkv")
        for _ in range(BLOCKS)
    ]

    def forward(attend):
        return [attend(q, k + 2 * drift.sin(), v, HEADS) for q, k, v in layers]

    return forward


@pytest.fixture
def calls(load_pack, monkeypatch):
    """(order's tokens, heads of the budget) of each library call."""
    module = load_pack("sparge.tune.call")
    library, seen = module.attention, []

    def spy(*args, order, head_settings, **kwargs):
        seen.append((order and order.tokens, head_settings and head_settings.heads))
        return library(*args, order=order, head_settings=head_settings, **kwargs)

    monkeypatch.setattr(module, "attention", spy)
    return seen


@pytest.mark.parametrize("mode", ["auto quality", "auto budget"])
def test_dense_steps_are_measured(patch, session, step, runs, calls, mode):
    patched = patch(mode=mode)
    session(patched, LATENT).sample(step, DENSE_THEN_SPARSE)
    ((run, _),) = runs
    assert run.tally.reasons == {"before start_percent 0.2": 2 * BLOCKS}
    assert run.tally.sparse == 3 * BLOCKS
    assert calls == [(TOKENS, HEADS)] * 3 * BLOCKS


def test_without_a_dense_step_the_first_pass_measures(patch, session, step, runs):
    session(patch(start_percent=0.0), LATENT).sample(step, [0.5, 0.4, 0.3])
    ((run, _),) = runs
    assert run.tally.reasons == {"measuring": BLOCKS}
    assert run.tally.sparse == 2 * BLOCKS


@pytest.mark.parametrize("start_percent", [0.0, 0.2])
def test_each_conditioning_is_measured_alone_or_in_a_batch(
    patch, session, step, runs, start_percent
):
    patched = patch(start_percent=start_percent)
    sigmas = [0.9, 0.7, 0.5]
    session(patched, LATENT).sample(step, sigmas)
    session(patched, LATENT).sample(step, sigmas, conditionings=([0], [1]))
    (batch, _), (apart, _) = runs
    assert apart.tally.sparse == 2 * batch.tally.sparse == 2 * 2 * BLOCKS
    assert apart.tally.dense == 2 * batch.tally.dense == 2 * BLOCKS
    assert [begun.record.step for begun in apart.session._passes] == [0, 0, 1, 1, 2, 2]
    one, other = (run.session.tables.chosen[0].settings for run in (batch, apart))
    # The session gives both conditionings the same tensors: twice the sums, the same ratio.
    for name in ("density", "pool_weight", "output_scale", "head_weight"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("dense", [[], [0.9], [1.0, 0.9], [1.0, 0.95, 0.9]])
@pytest.mark.parametrize("conditionings", [([1, 0],), ([0], [1]), ([0],)])
def test_a_shape_nobody_expected_costs_no_step(
    patch, session, step, runs, calls, dense, conditionings
):
    """The shape is met in the dense steps: in the last of them it is measured, or in the first step
    where there are none."""
    patched = patch(torch.nn.Module(), start_percent=0.2 if dense else 0.0)
    session(patched).sample(step, [*dense, 0.5, 0.4, 0.3], conditionings)
    ((run, _),) = runs
    passes = BLOCKS * len(conditionings)
    why = "before start_percent 0.2" if dense else "measuring"
    assert run.tally.reasons == {why: max(1, len(dense)) * passes}
    assert calls == [(None, HEADS)] * (3 if dense else 2) * passes


def test_text_stays_exact_in_cubes(patch, session, runs, calls, generator):
    class AsymmDiTJoint(WanModel):
        def __init__(self):
            super().__init__()
            self.patch_size = 2

    q = torch.randn(1, TOKENS + 40, HEADS * 64, generator=generator)
    running = session(patch(AsymmDiTJoint(), "manual"), LATENT, torch.zeros(1, 40, 8))
    running.sample(lambda attend: attend(q, q, q, HEADS), [0.5])
    assert calls == [(TOKENS + 40, None)]


def test_manual_mode_keeps_the_order_of_tokens_that_do_not_fit(patch, session, step, calls):
    patched = patch(mode="manual")
    session(patched, (5, 16, 16)).sample(step, [0.5])
    session(patched, LATENT).sample(step, [0.5])
    assert calls == [(None, None)] * BLOCKS + [(TOKENS, None)] * BLOCKS


def test_what_outlives_a_call_is_made_between_calls(
    load_pack, patch, session, step, runs, monkeypatch
):
    inside, made = [], Counter()
    sparge, tune = load_pack("sparge"), load_pack("sparge.tune")

    def watched(owner, name, original):
        def made_here(*args, **kwargs):
            made[name, bool(inside)] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, made_here)

    watched(tune.Measurement, "begin", tune.Measurement.begin)
    watched(tune.Probe, "begin", tune.Probe.begin)
    watched(sparge.HeadSettings, "_make_table", sparge.HeadSettings._make_table)
    record = load_pack("sparge.tune").PassRecord
    watched(record, "begin", record.begin)
    forward = load_pack("nodes.forward").Forward
    attend = forward.attend

    def entered(*args):
        inside.append(1)
        try:
            return attend(*args)
        finally:
            inside.pop()

    monkeypatch.setattr(forward, "attend", entered)
    session(patch(), LATENT).sample(step, DENSE_THEN_SPARSE)
    assert made == {
        ("begin", False): 2 + len(DENSE_THEN_SPARSE),  # a measurement, a probe, a record a pass
        ("_make_table", False): 1,  # of all layers, as all steps are alike
    }


@pytest.fixture
def samples(load_pack, monkeypatch):
    """(layer, sum of q) of each sample."""
    seen = []
    measurement = load_pack("sparge.tune").Measurement
    original = measurement.add

    def sample(self, layer, q, k, v, **kwargs):
        seen.append((layer, float(q.sum())))
        return original(self, layer, q, k, v, **kwargs)

    monkeypatch.setattr(measurement, "add", sample)
    return seen


@pytest.fixture
def numbered(step):
    """The n-th forward pass has queries (n + 1) times as large: their sum tells which one it is."""
    sums, passes = [], itertools.count(1)

    def forward(attend):
        factor, layers = next(passes), itertools.count()

        def scaled(q, k, v, heads):
            if next(layers) == 0:
                sums.append(float((q * factor).sum()))
            return attend(q * factor, k, v, heads)

        return step(scaled)

    forward.sums = sums
    return forward


@pytest.mark.parametrize(
    ("conditionings", "measured"),
    [(([1, 0],), [4, 4]), (([1], [0]), [8, 9])],
    ids=["in one batch", "one by one"],
)
def test_the_last_dense_step_is_measured(
    patch, session, numbered, samples, conditionings, measured
):
    running = session(patch(start_percent=0.45), LATENT)
    running.sample(numbered, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5], conditionings)
    assert Counter(layer for layer, _ in samples) == dict.fromkeys(range(BLOCKS), 2)
    first = [total for layer, total in samples if layer == 0]
    assert [numbered.sums.index(total) for total in first] == measured


def test_evaluations_between_steps_are_placed_by_noise_level(patch, session, numbered, samples):
    """A midpoint sampler; .55 and above is dense: the last dense step begins with pass 6."""
    between = [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.5]
    session(patch(start_percent=0.45), LATENT).sample(
        numbered, between, schedule=[1.0, 0.9, 0.8, 0.7, 0.5]
    )
    first = [total for layer, total in samples if layer == 0]
    assert [numbered.sums.index(total) for total in first] == [6, 6]


@pytest.mark.parametrize("comes_again", [True, False])
def test_a_layer_that_was_skipped_when_it_should_be_measured(
    patch, session, step, runs, comes_again
):
    """A cache skips it in the last three dense passes, which delays the first sparse pass by
    one.
    """
    passes = itertools.count()

    def cached(attend):
        number, layers = next(passes), itertools.count()
        skips = 1 <= number <= 3 or (number > 3 and not comes_again)

        def first_only(q, k, v, heads):
            return v if skips and next(layers) == 1 else attend(q, k, v, heads)

        return step(first_only)

    running = session(patch(start_percent=0.45), LATENT)
    running.sample(cached, [1.0, 0.9, 0.8, 0.7, 0.5, 0.4])
    ((run, _),) = runs
    assert run.tally.reasons["measuring"] == (2 if comes_again else 1)
    assert run.tally.sparse == (2 if comes_again else 1)


@pytest.mark.parametrize("kind", ["refusal", "memory", "build"])
def test_what_cannot_be_measured_stays_dense_with_its_reason(
    load_pack, patch, session, step, runs, monkeypatch, kind
):
    error, reason = {
        "refusal": (load_pack("sparge").Unsupported("no such head"), "no such head"),
        "memory": (torch.OutOfMemoryError("full"), "not enough memory to measure this layer"),
        "build": (
            load_pack("sparge").KernelBuildError("attend", "line 1"),
            "a kernel did not compile (see the log)",
        ),
    }[kind]

    def refuse(sample):
        raise error

    monkeypatch.setattr(load_pack("sparge.tune.head_table"), "measure_for", lambda device: refuse)
    session(patch(start_percent=0.0), LATENT).sample(step, [0.5, 0.4])
    ((run, _),) = runs
    assert run.tally.reasons == {reason: 2 * BLOCKS}


NAN = "the model gave NaN here, without this node's doing"


def test_a_layer_without_finite_numbers_stays_dense(patch, session, step, runs):
    def broken(attend):
        seen = iter(range(BLOCKS))

        def first_is_infinite(q, k, v, heads):
            return attend(q, k, v * torch.inf if next(seen) == 0 else v, heads)

        return step(first_is_infinite)

    session(patch(start_percent=0.0), LATENT).sample(broken, [0.5, 0.4])
    ((run, _),) = runs
    assert run.tally.reasons == {"measuring": BLOCKS, NAN: 1}
    assert run.tally.sparse == BLOCKS - 1


def test_text_alone_is_no_work_for_heads(patch, session, runs, generator):
    class Flux(WanModel):
        def __init__(self):
            super().__init__()
            self.patch_size = 2

    # The image's one token is in the query block in which the text ends.
    q = torch.randn(1, 1 + 190, HEADS * 64, generator=generator)
    running = session(patch(Flux(), min_tokens=100), (2, 2), torch.zeros(1, 190, 8))
    running.sample(lambda attend: attend(q, q, q, HEADS), [0.5, 0.4])
    ((run, _),) = runs
    (reason,) = run.tally.reasons
    assert "Every query block holds exact tokens" in reason


def test_the_result_of_a_run_holds_nothing_of_it(load_pack, patch, session, step, runs):
    patched = patch()
    session(patched, LATENT).sample(step, DENSE_THEN_SPARSE)
    result = load_pack("nodes.hook").hook_of(patched).last
    assert result.report.by_step.shape == (BLOCKS, len(DENSE_THEN_SPARSE))
    assert (result.report.by_step[:, :2] == 1).all()
    kept = float(result.report.by_step[:, 2:].mean())
    assert result.report.densities.overall == pytest.approx(kept)
    (shape,) = result.report.shapes
    assert shape.layers.tolist() == list(range(BLOCKS))
    error = result.report.mean_error("predicted")
    assert error == pytest.approx(float((shape.predicted * shape.head_weight).mean()))
    assert 0 < error <= 0.06, "blocks are large beside so few tokens"
    run = weakref.ref(runs[0][0])
    runs.clear()
    gc.collect()
    assert run() is None


@pytest.mark.parametrize("loud", range(HEADS))
def test_a_loud_heads_error_counts_for_more(load_pack, patch, session, step, loud):
    """Its values are eight times as large, in one layer."""
    times = torch.ones(HEADS).index_fill(0, torch.tensor(loud), 8.0).repeat_interleave(64)

    def louder(attend):
        numbers = itertools.count()
        return step(lambda q, k, v, heads: attend(q, k, v * times ** (not next(numbers)), heads))

    patched = patch(quality="fast")
    session(patched, LATENT).sample(louder, DENSE_THEN_SPARSE)
    result = load_pack("nodes.hook").hook_of(patched).last
    (shape,) = result.report.shapes
    first, second = shape.head_weight
    assert float(shape.head_weight.mean()) == pytest.approx(1)
    assert float(first[loud] / first[1 - loud]) == pytest.approx(8, rel=0.5)
    assert float(second[loud] / second[1 - loud]) == pytest.approx(1, rel=0.5)
    for name in ("predicted", "probed"):
        errors = getattr(shape, name)
        known = ~errors.isnan()
        counts = shape.head_weight[known]
        expected = float((errors[known] * counts).sum() / counts.sum())
        assert result.report.mean_error(name) == pytest.approx(expected)
        assert f"{name} error {expected:.3f}" in load_pack("nodes.report").summary(result)


def test_the_same_run_twice(patch, session, step):
    patched = patch(quality="fast")
    first, second = (session(patched, LATENT).sample(step, DENSE_THEN_SPARSE) for _ in range(2))
    assert all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip
