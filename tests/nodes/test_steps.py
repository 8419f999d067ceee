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
    ("mode", "passes", "counted"),
    [
        ("manual", ([0], [1]), True),
        ("auto quality", ([0], [1]), True),
        ("manual", ([0], [0], [1]), True),
        ("manual", ([0, 1], [0, 1], [0, 1]), True),
        ("manual", ([0], [1]), False),
    ],
    ids=str,
)
def test_all_passes_of_an_evaluation_take_one_variant(load_pack, steps_of, mode, passes, counted):
    """Two prompts, windows of context: in one batch or one by one, as memory allows. A pack that
    samples past the guiders calls no predict_noise: then conditionings tell steps apart."""

    def past_the_guiders(patched):
        if not counted:
            patched.remove_wrappers_with_key("predict_noise", "sparge_attention")

    found, _ = steps_of(SIX_SPARSE, mode=mode, conditionings=passes, prepared=past_the_guiders)
    variants, orders = load_pack("sparge").VARIANTS, orders_of(found)
    steps = [orders[at : at + len(passes)] for at in range(0, len(orders), len(passes))]
    assert all(len(set(map(id, step))) == 1 for step in steps)
    assert len({id(step[0]) for step in steps[:variants]}) == variants


@pytest.mark.parametrize("steps", [2, 6])
def test_passes_that_are_measured_have_no_part_in_the_mean(steps_of, steps):
    sigmas = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3][:steps]
    sparse, got = steps_of(sigmas, topk=0.4, start_percent=0.0, **BUDGET)
    (table,) = got.run.session.tables.chosen
    assert len(sparse) == len(table._given()) == steps - 1
    for densities, settings in zip(densities_of(sparse), table._given(), strict=True):
        assert torch.equal(densities, settings.density[:BLOCKS])


def test_a_mean_density_falls_and_a_target_does_not(steps_of):
    """It falls among steps of one kind, between two settings."""
    steps, got = steps_of(SIX_SPARSE, topk=0.3, **BUDGET)
    means = torch.stack([step.mean() for step in densities_of(steps)])
    for between_choices in means.split(3):
        assert between_choices[0] >= between_choices[-1], "both are of one kind"
    for of_kind in (means[::2], means[1::2]):
        assert of_kind[0] > of_kind[-1]
    (table,) = got.run.session.tables.chosen
    kept = [table._kept_shares(settings.density, 1)[:BLOCKS] for settings in table._given()]
    torch.testing.assert_close(table.density()[:BLOCKS], torch.stack(kept).mean(0))
    errors = torch.stack([settings.error for settings in table._given()])
    assert torch.equal(table.predicted(), errors.double().mean(0).float())
    for widgets in ({"mode": "auto quality", "quality": "fast"}, {**BUDGET, "topk": 0.6}):
        first, *others = densities_of(steps_of(SIX_SPARSE[:6], **widgets)[0])
        assert len(others) == 3 and all(torch.equal(first, other) for other in others)


@pytest.fixture
def measured(steps_of):
    """measured(**widgets): calls and table of six sparse steps that measure."""

    def of(**widgets):
        calls, got = steps_of(SIX_SPARSE, **widgets)
        assert got.notes == []
        (table,) = got.run.session.tables.chosen
        return calls, table

    return of


@pytest.mark.parametrize(("topk", "least"), [(0.6, 0.5), (0.3, 0.24)])
def test_steps_spend_their_density(measured, topk, least):
    """A head's next step, for which there may be no room, is up to two whole steps: a sixth of the
    mean over four heads."""
    steps, table = measured(topk=topk, **BUDGET)
    for calls, settings in zip(steps, table._given(), strict=True):
        assert torch.equal(torch.stack([call.density for call in calls]), settings.density[:BLOCKS])
        weights = torch.stack([call.pool_weight for call in calls])
        assert torch.equal(weights, settings.pool_weight[:BLOCKS]) and weights.any()
    kept = [float(table._kept_shares(x.density, x.floor)[:BLOCKS].mean()) for x in table._given()]
    assert least < sum(kept) / 6 <= topk


def test_steps_keep_to_the_target(load_pack, measured, monkeypatch):
    target = 0.7  # these heads are hard
    monkeypatch.setitem(load_pack("sparge.sampling").QUALITIES, "fast", target)
    _, table = measured(mode="auto quality", quality="fast")
    assert all(0.8 * target < of_step.mean_error <= target for of_step in table._given())


def test_a_run_does_not_wait_for_the_garbage_collector(steps_of, runs):
    """Its tables hold memory of the device, which a second sampler needs."""
    got = steps_of(SIX_SPARSE[:4], topk=0.4, **BUDGET)[1]
    table = weakref.ref(got.run.session.tables.chosen[0])
    gc.disable()
    try:
        del got
        runs.clear()
        assert table() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("passes", "again"),
    [([[0]], 0), ([[0]], 1), ([[1], [0]], 2), ([[0], [0], [1]], 2), ([[1, 0]], 2), ([[1]], 2)],
    ids=str,
)
def test_heads_are_measured_again(load_pack, steps_of, monkeypatch, passes, again):
    """The positive prompt is, as often as the dense calls afford it."""
    tune, cost = load_pack("sparge.tune"), load_pack("sparge.speed.measuring_cost")
    monkeypatch.setattr(load_pack("sparge.tune.step_settings"), "LEAST_STEPS", 2)
    afforded = cost.Afforded(3, again)
    monkeypatch.setattr(tune.Ways, "affordable", lambda *args, **kwargs: afforded)
    added, add = [], tune.Measurement.add

    def noted(self, layer, *args, **kwargs):
        added.append((layer, kwargs["calls"]))
        return add(self, layer, *args, **kwargs)

    monkeypatch.setattr(tune.Measurement, "add", noted)
    steps_of(TEN_SPARSE, topk=0.4, conditionings=passes, **BUDGET)
    conditionings = {one for each in passes for one in each}
    calls = 2 if len(conditionings) == 1 else 1
    first = [(layer, calls) for layer in range(BLOCKS)] * len(conditionings)
    then = [(layer, cost.AGAIN_CALLS) for layer in range(BLOCKS)]
    assert sorted(added[: len(first)]) == sorted(first)
    assert added[len(first) :] == then * again * (0 in conditionings)


def test_heads_are_measured_again_where_no_pass_asks_for_its_noise_level(load_pack, steps_of):
    """A target and start_percent 0: heads are chosen anew when any other run of as many does."""
    changes = []
    for widgets in ({"mode": "auto quality", "start_percent": 0.0}, {"topk": 0.5, **BUDGET}):
        sigmas = [0.8 - 0.05 * step for step in range(15)]
        steps, got = steps_of(sigmas, **widgets)
        assert len(steps) == 14 and got.run.needs_level == (widgets["mode"] == "auto budget")
        given = got.run.session.tables.chosen[0]._given()
        changes.append([at for at in range(1, 14) if given[at] is not given[at - 1]])
    assert changes[0] == changes[1] == [6, 12]


def test_a_step_that_is_not_finite_spoils_no_later_one(load_pack, steps_of, monkeypatch):
    """It does not even where heads are measured again in it: sums that are not finite are those of
    the measurement before."""
    finite, fetched = [], load_pack("sparge.tune.fetched_sums").FetchedSums
    fill = fetched.fill_from

    def spy(self, earlier):
        finite.append(all(x.isfinite().all() for x in self.sums))
        fill(self, earlier)
        finite.append(all(x.isfinite().all() for x in self.sums))

    monkeypatch.setattr(fetched, "fill_from", spy)
    steps, _ = steps_of(TEN_SPARSE, broken=4, topk=0.5, **BUDGET)
    assert finite == [False, True] and len(steps) == 10
    assert all(call.density is not None and call.density.isfinite().all() for call in steps[-1])


def test_a_step_is_worked_out_while_the_one_before_is_computed(load_pack, steps_of, monkeypatch):
    """The GPU waits where a step begins, so nothing is worked out there."""
    settings_class = load_pack("sparge.tune").StepSettings
    error_table = load_pack("sparge.tune.error_table").ErrorTable
    at, settings, done = settings_class.at, error_table.settings, []

    def noted(self, step):
        done.append("begin")
        given = at(self, step)
        done.append(step)
        return given

    def worked_out(self, *args):
        done.append("worked out")
        return settings(self, *args)

    monkeypatch.setattr(settings_class, "at", noted)
    monkeypatch.setattr(error_table, "settings", worked_out)
    steps_of(SIX_SPARSE, topk=0.4, conditionings=([0], [1]), **BUDGET)
    expected = [each for step in range(6) for each in ("worked out", "begin", step)]
    assert done[: done.index(5) + 1] == expected
