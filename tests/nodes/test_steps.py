# SPDX-License-Identifier: Apache-2.0
"""Changes from one sparse step to the next: the order of tokens and the densities."""

from __future__ import annotations

import gc
import weakref
from typing import NamedTuple

import pytest
import torch

pytestmark = pytest.mark.usefixtures("reference_allowed")

HEADS, BLOCKS = 2, 2
LATENT = (8, 24, 24)
GRID = (8, 12, 12)
TOKENS = 8 * 12 * 12
SIX_SPARSE = [1.0, 0.9, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
TEN_SPARSE = [*SIX_SPARSE, 0.15, 0.1, 0.05, 0.02]


class Call(NamedTuple):
    """Arguments that a sparse call was given."""

    order: object
    density: torch.Tensor | None
    pool_weight: torch.Tensor | None


@pytest.fixture
def patch(patched_wan):
    """patch(**widgets): a patched patcher."""
    return lambda **widgets: patched_wan(min_tokens=TOKENS, **widgets)


@pytest.fixture
def steps_of(load_pack, monkeypatch, session, generator):
    """steps_of(patched, sigmas): the sparse calls, by step and block. broken: the value of one
    channel is NaN while the sparse step of that number runs."""
    module = load_pack("sparge.tune.call")
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)
    # Keys that are alike in space, so that another block is worth the less the more are kept.
    drift = torch.linspace(0, 30, TOKENS)[:, None] + torch.arange(HEADS * 64)
    layers[:, :2] += 2 * drift.sin()
    library, seen = module.attention, []

    def spy(*args, order, head_settings, **kwargs):
        values = (
            (head_settings.density.clone(), head_settings.pool_weight.clone())
            if head_settings
            else (None, None)
        )
        seen.append(Call(order, *values))
        return library(*args, order=order, head_settings=head_settings, **kwargs)

    monkeypatch.setattr(module, "attention", spy)

    def of(patched, sigmas, broken=None, **kwargs):
        seen.clear()

        def run(attend):
            now = layers.clone()
            if broken is not None and len(seen) == broken * BLOCKS:
                now[:, 2, ..., 0] = float("nan")
            return [attend(*layer, HEADS) for layer in now]

        session(patched, LATENT).sample(run, sigmas, **kwargs)
        return [seen[at : at + BLOCKS] for at in range(0, len(seen), BLOCKS)]

    return of


@pytest.mark.parametrize("mode", ["manual", "auto quality", "auto budget"])
def test_steps_take_the_orders_in_turn(load_pack, patch, steps_of, mode):
    steps = steps_of(patch(mode=mode), SIX_SPARSE)
    variants = load_pack("sparge").VARIANTS
    assert len(steps) == 6
    orders = [step[0][0] for step in steps]
    assert all(call.order is orders[at] for at, step in enumerate(steps) for call in step)
    assert len(set(map(id, orders))) == variants
    assert orders[:variants] == orders[variants:]


def test_manual_mode_takes_rows_between_cubes(load_pack, patch, steps_of):
    order = load_pack("sparge.order")
    steps = steps_of(patch(mode="manual"), SIX_SPARSE)
    grid = order.TokenGrid(*GRID)
    third, first, second = (step[0][0] for step in steps[:3])  # two were dense
    assert third is order.cube_order(grid, 2)
    assert first is order.cube_order(grid)
    assert second is order.unmeasured_order(grid, 1) is not order.cube_order(grid, 1)


@pytest.mark.parametrize("apart", [([0], [1]), ([0], [0], [1]), ([0, 1], [0, 1], [0, 1])])
def test_all_passes_of_an_evaluation_take_one_variant(load_pack, patch, steps_of, apart):
    """Two prompts, windows of context: in one batch or one by one, as memory allows."""
    passes = steps_of(patch(mode="manual"), SIX_SPARSE, conditionings=apart)
    variants = load_pack("sparge").VARIANTS
    orders = [step[0][0] for step in passes]
    steps = [orders[at : at + len(apart)] for at in range(0, len(orders), len(apart))]
    assert all(len(set(map(id, step))) == 1 for step in steps)
    assert len({id(step[0]) for step in steps[:variants]}) == variants


def given(steps) -> list[torch.Tensor]:
    """(blocks, heads) densities of each step."""
    return [torch.stack([call.density for call in step]) for step in steps]


@pytest.mark.parametrize("steps", [2, 3, 4, 6])
def test_passes_that_are_measured_have_no_part_in_the_mean(patch, steps_of, runs, steps):
    sigmas = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3][:steps]
    sparse = steps_of(patch(mode="auto budget", topk=0.4, start_percent=0.0), sigmas)
    assert len(sparse) == steps - 1
    (table,) = runs[-1][0].session.tables.chosen
    assert len(table._given()) == steps - 1
    for densities, settings in zip(given(sparse), table._given(), strict=True):
        assert torch.equal(densities, settings.density[:BLOCKS])


def test_nothing_of_an_order_stays_on_a_device(load_pack, patch, steps_of):
    module = load_pack("sparge.order.grid")
    for mode in ("manual", "auto quality"):
        steps_of(patch(mode=mode), SIX_SPARSE)
        grid = load_pack("sparge").TokenGrid(*GRID)
        for variant in range(load_pack("sparge").VARIANTS):
            for order in (module.unmeasured_order(grid, variant), module.grid_order(grid, variant)):
                assert not order._copies


def test_cond_and_uncond_take_the_same_variant(patch, steps_of):
    apart = steps_of(patch(mode="auto quality"), SIX_SPARSE, conditionings=([0], [1]))
    assert all(one[0][0] is other[0][0] for one, other in zip(apart[::2], apart[1::2], strict=True))


def test_a_mean_density_falls_and_a_target_does_not(patch, steps_of, runs):
    """It falls among steps of one kind, between two settings."""
    falling = given(steps_of(patch(mode="auto budget", topk=0.3), SIX_SPARSE))
    means = torch.stack([step.mean() for step in falling])
    for between_choices in means.split(3):
        assert between_choices[0] >= between_choices[-1], "both are of one kind"
    for of_kind in (means[::2], means[1::2]):
        assert of_kind[0] > of_kind[-1]
    (table,) = runs[-1][0].session.tables.chosen
    kept = [table._kept_shares(settings.density, 1)[:BLOCKS] for settings in table._given()]
    torch.testing.assert_close(table.density()[:BLOCKS], torch.stack(kept).mean(0))
    errors = torch.stack([settings.error for settings in table._given()])
    assert torch.equal(table.predicted(), errors.double().mean(0).float())

    for widgets in (
        {"mode": "auto quality", "quality": "fast"},
        {"mode": "auto budget", "topk": 0.6},
    ):
        first, *others = given(steps_of(patch(**widgets), SIX_SPARSE[:6]))
        assert len(others) == 3 and all(torch.equal(first, other) for other in others)


@pytest.fixture
def saved(load_pack, tmp_path):
    """saved(patched): the profile of its last run, from a file."""

    def made(patched):
        path = load_pack("sparge.tune").profile_path(tmp_path, "clip")
        load_pack("nodes.hook").hook_of(patched).last.profile.save(path)
        return load_pack("nodes.profiles").NamedProfile.load(tmp_path, "clip")

    return made


@pytest.fixture
def run_of(steps_of, runs):
    """run_of(patched): densities and pool weights of six sparse steps, and their settings."""

    def of(patched):
        steps = steps_of(patched, SIX_SPARSE)
        assert runs[-1][0].notes == []
        (table,) = runs[-1][0].session.tables.chosen
        pool_weights = [torch.stack([call.pool_weight for call in step]) for step in steps]
        return given(steps), pool_weights, table._given()

    return of


@pytest.mark.parametrize(("topk", "least"), [(0.6, 0.5), (0.3, 0.24)])
def test_steps_spend_their_density(patch, run_of, runs, saved, topk, least):
    """A head's next step, for which there may be no room, is up to two whole steps: a sixth of the
    mean over four heads."""
    patched = patch(mode="auto budget", topk=topk)
    measured = run_of(patched)
    profiled = run_of(patch(mode="auto budget", topk=topk, profile=saved(patched)))
    for densities, pool_weights, settings in (measured, profiled):
        for step, of_step in enumerate(settings):
            assert torch.equal(densities[step], of_step.density[:BLOCKS])
            assert (
                torch.equal(pool_weights[step], of_step.pool_weight[:BLOCKS])
                and pool_weights[step].any()
            )
        (table,) = runs[-1][0].session.tables.chosen
        kept = [float(table._kept_shares(x.density, x.floor)[:BLOCKS].mean()) for x in settings]
        assert least < sum(kept) / 6 <= topk
    assert all(settings is profiled[2][0] for settings in profiled[2])


def test_steps_keep_to_the_target(load_pack, patch, run_of, saved, monkeypatch):
    target = 0.7  # these heads are hard
    monkeypatch.setitem(load_pack("nodes.settings").QUALITIES, "fast", target)
    widgets = {"mode": "auto quality", "quality": "fast"}
    patched = patch(**widgets)
    measured, profiled = run_of(patched), run_of(patch(profile=saved(patched), **widgets))
    for _, _, settings in (measured, profiled):
        assert all(0.8 * target < of_step.mean_error <= target for of_step in settings)


def test_a_run_does_not_wait_for_the_garbage_collector(patch, steps_of, runs):
    """Its tables hold memory of the device, which a second sampler needs."""
    steps_of(patch(mode="auto budget", topk=0.4), SIX_SPARSE)
    table = weakref.ref(runs[-1][0].session.tables.chosen[0])
    gc.disable()
    try:
        runs.clear()
        assert table() is None
    finally:
        gc.enable()


def test_a_pack_that_samples_past_the_guiders(patch, patcher, steps_of, load_pack):
    """Then nothing calls predict_noise, and conditionings tell steps apart."""
    patched = patch(mode="manual")
    patched.remove_wrappers_with_key("predict_noise", "sparge_attention")
    passes = steps_of(patched, SIX_SPARSE, conditionings=([0], [1]))
    orders = [step[0][0] for step in passes]
    assert orders[::2] == orders[1::2]
    assert len(set(map(id, orders))) == load_pack("sparge").VARIANTS


@pytest.mark.parametrize(
    ("passes", "again"),
    [
        ([[0]], 0),
        ([[0]], 1),
        ([[0]], 2),
        ([[1], [0]], 2),
        ([[0], [0], [1]], 2),
        ([[1, 0]], 2),
        ([[1]], 2),
    ],
)
def test_heads_are_measured_again(load_pack, patch, steps_of, monkeypatch, passes, again):
    """The positive prompt is, as often as the dense calls afford it."""
    tune, cost = load_pack("sparge.tune"), load_pack("sparge.speed.measuring_cost")
    monkeypatch.setattr(load_pack("sparge.tune.step_settings"), "LEAST_STEPS", 2)
    afforded = cost.Afforded(3, again)
    monkeypatch.setattr(tune.Ways, "affordable", lambda *args, **kwargs: afforded)
    added, add = [], tune.Measurement.add

    def noted(self, layer, *args, **kwargs):
        added.append((layer, kwargs.get("calls", 1)))
        return add(self, layer, *args, **kwargs)

    monkeypatch.setattr(tune.Measurement, "add", noted)
    steps_of(patch(mode="auto budget", topk=0.4), TEN_SPARSE, conditionings=passes)
    conditionings = {one for each in passes for one in each}
    calls = 2 if len(conditionings) == 1 else 1
    first = [(layer, calls) for layer in range(BLOCKS)] * len(conditionings)
    then = [(layer, 1) for layer in range(BLOCKS)]
    assert sorted(added[: len(first)]) == sorted(first)
    assert added[len(first) :] == then * again * (0 in conditionings)


def test_a_step_that_is_not_finite_spoils_no_later_one(load_pack, patch, steps_of, monkeypatch):
    """It does not even where heads are measured again in it."""
    measured = []
    fetched = load_pack("sparge.tune.fetched_sums").FetchedSums
    fill = fetched.fill_from

    def spy(self, earlier):
        measured.append(self.sums[0].isnan().any().item())
        fill(self, earlier)

    monkeypatch.setattr(fetched, "fill_from", spy)
    steps = steps_of(patch(mode="auto budget", topk=0.5), TEN_SPARSE, broken=4)
    assert measured == [True]
    assert len(steps) == 10
    assert all(call.density is not None and call.density.isfinite().all() for call in steps[-1])


def test_a_step_is_worked_out_while_the_one_before_is_computed(
    load_pack, patch, steps_of, monkeypatch
):
    """The GPU waits where a step begins, so nothing is worked out there."""
    tune, error_table = (
        load_pack("sparge.tune"),
        load_pack("sparge.tune.error_table").ErrorTable,
    )
    at, settings, done = tune.StepSettings.at, error_table.settings, []

    def noted(self, step):
        done.append("begin")
        given = at(self, step)
        done.append(step)
        return given

    def worked_out(self, *args):
        done.append("worked out")
        return settings(self, *args)

    monkeypatch.setattr(tune.StepSettings, "at", noted)
    monkeypatch.setattr(error_table, "settings", worked_out)
    steps_of(patch(mode="auto budget", topk=0.4), SIX_SPARSE, conditionings=([0], [1]))
    of_run = done[: done.index(5) + 1]
    assert of_run == [each for step in range(6) for each in ("worked out", "begin", step)]
