# SPDX-License-Identifier: Apache-2.0
"""Changes from one sparse step to the next: the order of tokens and the densities."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.nodes.parts import BLOCKS, HEADS

pytestmark = pytest.mark.usefixtures("reference_allowed")

LATENT, GRID = (8, 24, 24), (8, 12, 12)
TOKENS = 8 * 12 * 12
SIX_SPARSE = [1.0, 0.9, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
TEN_SPARSE = [*SIX_SPARSE, 0.15, 0.1, 0.05, 0.02]
BUDGET = {"mode": "auto budget"}


@pytest.fixture
def uncomputed(load_pack, monkeypatch):
    """Sparse calls are checked and give zeros: what they are asked is all that counts here, and
    the reference would take most of the time."""
    reference = load_pack("sparge.stages.on_reference")
    monkeypatch.setattr(reference, "compute", lambda call, out, *_: out.zero_())


@pytest.fixture
def steps_of(uncomputed, sampled, asked, generator):
    """steps_of(sigmas, **widgets): the sparse calls, by pass and block, and the run. broken: the
    value of one channel is NaN while the sparse step of that number runs."""
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)
    # Keys that are alike in space, so that another block is worth the less the more are kept.
    drift = torch.linspace(0, 30, TOKENS)[:, None] + torch.arange(HEADS * 64)
    layers[:, :2] += 2 * drift.sin()

    def of(sigmas, broken=None, **given):
        asked.clear()

        def step(attend):
            now = layers.clone()
            if broken is not None and len(asked) == broken * BLOCKS:
                now[:, 2, ..., 0] = float("nan")
            return [attend(*layer, HEADS) for layer in now]

        got = sampled(step, sigmas, latent=LATENT, **{"min_tokens": TOKENS} | given)
        return [asked[at : at + BLOCKS] for at in range(0, len(asked), BLOCKS)], got

    return of


def heads_of(got):
    """The heads of a run whose calls have one shape."""
    (heads,) = got.run._heads.values()
    return heads


def orders_of(passes):
    return [calls[0].order for calls in passes]


def densities_of(passes) -> list[torch.Tensor]:
    """(blocks, heads) of each pass."""
    return [torch.stack([call.density for call in calls]) for calls in passes]


@pytest.mark.parametrize("mode", ["manual", "auto quality", "auto budget"])
def test_steps_take_the_orders_in_turn(load_pack, steps_of, mode):
    steps, _ = steps_of(SIX_SPARSE, mode=mode)
    variants, orders = load_pack("sparge").VARIANTS, orders_of(steps)
    assert len(steps) == 6
    assert all(call.order is orders[at] for at, step in enumerate(steps) for call in step)
    assert len(set(map(id, orders))) == variants
    assert orders[:variants] == orders[variants:]
    assert not any(order._copies for order in orders), "none stays on a device"


def test_manual_mode_takes_rows_between_cubes(load_pack, steps_of):
    order = load_pack("sparge.order")
    grid = order.TokenGrid(*GRID)
    third, first, second, *_ = orders_of(steps_of(SIX_SPARSE)[0])  # two were dense
    assert third is order.cube_order(grid, 2)
    assert first is order.cube_order(grid)
    assert second is order.unmeasured_order(grid, 1) is not order.cube_order(grid, 1)


@pytest.mark.parametrize(
    ("mode", "passes"),
    [
        ("manual", ([0], [1])),
        ("auto quality", ([0], [1])),
        ("manual", ([0], [0], [1])),
        ("manual", ([0, 1], [0, 1], [0, 1])),
    ],
    ids=str,
)
def test_all_passes_of_an_evaluation_take_one_variant(load_pack, steps_of, mode, passes):
    """Two prompts, windows of context: in one batch or one by one, as memory allows."""
    found, _ = steps_of(SIX_SPARSE, mode=mode, conditionings=passes)
    variants, orders = load_pack("sparge").VARIANTS, orders_of(found)
    steps = [orders[at : at + len(passes)] for at in range(0, len(orders), len(passes))]
    assert all(len(set(map(id, step))) == 1 for step in steps)
    assert len({id(step[0]) for step in steps[:variants]}) == variants


@pytest.mark.parametrize("steps", [2, 6])
def test_passes_that_are_measured_have_no_part_in_the_mean(steps_of, steps):
    sigmas = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3][:steps]
    sparse, got = steps_of(sigmas, topk=0.4, start_percent=0.0, **BUDGET)
    given = heads_of(got).given
    assert len(sparse) == len(given) == steps - 1
    for densities, (settings, step, _) in zip(densities_of(sparse), given, strict=True):
        assert torch.equal(densities, settings.density[step])


def test_a_mean_density_falls_and_a_target_does_not(steps_of):
    """It falls among steps of one kind, between two settings."""
    steps, _ = steps_of(SIX_SPARSE, topk=0.3, **BUDGET)
    means = torch.stack([step.mean() for step in densities_of(steps)])
    for between_choices in means.split(3):
        assert between_choices[0] >= between_choices[-1], "both are of one kind"
    for of_kind in (means[::2], means[1::2]):
        assert of_kind[0] > of_kind[-1]
    for widgets in ({"mode": "auto quality", "quality": "fast"}, {**BUDGET, "topk": 0.6}):
        first, *others = densities_of(steps_of(SIX_SPARSE[:6], **widgets)[0])
        assert len(others) == 3 and all(torch.equal(first, other) for other in others)


@pytest.fixture
def measured(steps_of):
    """measured(**widgets): calls of six sparse steps, and what each was given: settings, and its
    place in them."""

    def of(**widgets):
        calls, got = steps_of(SIX_SPARSE, **widgets)
        assert got.notes == []
        return calls, [(settings, step) for settings, step, _ in heads_of(got).given]

    return of


@pytest.mark.parametrize(("topk", "least"), [(0.6, 0.5), (0.3, 0.24)])
def test_steps_spend_their_density(measured, topk, least):
    """A head's next step, for which there may be no room, is up to two whole steps: a sixth of the
    mean over four heads."""
    steps, given = measured(topk=topk, **BUDGET)
    for calls, (settings, step) in zip(steps, given, strict=True):
        assert torch.equal(torch.stack([call.density for call in calls]), settings.density[step])
        weights = torch.stack([call.pool_weight for call in calls])
        assert torch.equal(weights, settings.pool_weight[step]) and weights.any()
    kept = [float(settings.kept[step].mean()) for settings, step in given]
    assert least < sum(kept) / 6 <= topk


def test_steps_keep_to_the_target(load_pack, measured, monkeypatch):
    target = 0.7  # these heads are hard
    monkeypatch.setitem(load_pack("sparge.session").QUALITIES, "fast", target)
    mean_error = load_pack("sparge.session.report").mean_error
    _, given = measured(mode="auto quality", quality="fast")
    for settings, step in given:
        assert 0.8 * target < mean_error(settings.error[step], settings.weight) <= target


def test_a_run_does_not_wait_for_the_garbage_collector(steps_of, runs):
    """Its heads hold memory of the device, which a second sampler needs."""
    got = steps_of(SIX_SPARSE[:4], topk=0.4, **BUDGET)[1]
    heads = weakref.ref(heads_of(got))
    gc.disable()
    try:
        del got
        runs.clear()
        assert heads() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("passes", "again"),
    [([[0]], 0), ([[0]], 1), ([[1], [0]], 2), ([[0], [0], [1]], 2), ([[1, 0]], 2), ([[1]], 2)],
    ids=str,
)
def test_heads_are_measured_again(load_pack, steps_of, monkeypatch, passes, again):
    """The positive prompt is, before each further choice."""
    module, measured = load_pack("sparge.session.heads"), []
    monkeypatch.setattr(load_pack("sparge.session.schedule"), "LEAST_STEPS", 2)
    monkeypatch.setattr(module, "AGAIN", again)
    measure = module.measure

    def noted(call, with_truth=False):
        measured.append((len(call.query_blocks), with_truth))
        return measure(call, with_truth)

    monkeypatch.setattr(module, "measure", noted)
    steps_of(TEN_SPARSE, topk=0.4, conditionings=passes, **BUDGET)
    prompts = {one for each in passes for one in each}
    first = [(module.BLOCKS // len(prompts), False)] * BLOCKS * len(prompts)
    then = [(module.BLOCKS, True)] * BLOCKS
    assert measured == first + then * again * (0 in prompts)


def test_heads_are_measured_again_where_no_pass_asks_for_its_noise_level(load_pack, steps_of):
    """A target and start_percent 0: heads are chosen anew when any other run of as many does."""
    changes = []
    for widgets in ({"mode": "auto quality", "start_percent": 0.0}, {"topk": 0.5, **BUDGET}):
        sigmas = [0.8 - 0.05 * step for step in range(15)]
        steps, got = steps_of(sigmas, **widgets)
        assert len(steps) == 14 and got.run.needs_level == (widgets["mode"] == "auto budget")
        given = [settings for settings, *_ in heads_of(got).given]
        changes.append([at for at in range(1, 14) if given[at] is not given[at - 1]])
    assert changes[0] == changes[1] == [6, 12]


def test_a_step_that_is_not_finite_spoils_no_later_one(load_pack, steps_of, monkeypatch):
    """It does not even where heads are measured again in it: sums that are not finite are those of
    the measurement before."""
    finite, sums = [], load_pack("sparge.session.measure").Sums
    or_else = sums.or_else

    def is_finite(found):
        return all(x.isfinite().all() for of_layer in found.of_layers.values() for x in of_layer)

    def spy(self, earlier):
        found = or_else(self, earlier)
        finite.append((is_finite(self), is_finite(found)))
        return found

    monkeypatch.setattr(sums, "or_else", spy)
    steps, got = steps_of(TEN_SPARSE, broken=5, topk=0.5, **BUDGET)
    assert finite == [(True, True), (False, True)] and len(steps) == 10
    assert all(call.density is not None and call.density.isfinite().all() for call in steps[-1])
    assert got.counts.sparse == 10 * BLOCKS
