# SPDX-License-Identifier: Apache-2.0
"""What changes from one sparse step to the next: the order of tokens and the densities."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

pytestmark = pytest.mark.usefixtures("reference_allowed")

HEADS, BLOCKS = 2, 2
LATENT = (8, 24, 24)
GRID = (8, 12, 12)
TOKENS = 8 * 12 * 12
SIX_SPARSE = [1.0, 0.9, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]


@pytest.fixture
def patch(patched_wan):
    """patch(**widgets): a patched patcher."""
    return lambda **widgets: patched_wan(min_tokens=TOKENS, **widgets)


@pytest.fixture
def steps_of(load_pack, monkeypatch, session, generator):
    """steps_of(patched, sigmas): orders and densities of the sparse calls, by step and block."""
    module = load_pack("nodes.attention_call")
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)
    # Keys that are alike in space, so that another block is worth the less the more are kept.
    drift = torch.linspace(0, 30, TOKENS)[:, None] + torch.arange(HEADS * 64)
    layers[:, :2] += 2 * drift.sin()
    library, seen = module.attention, []

    def spy(*args, order, budget, **kwargs):
        seen.append((order, budget and budget.density.clone()))
        return library(*args, order=order, budget=budget, **kwargs)

    monkeypatch.setattr(module, "attention", spy)

    def of(patched, sigmas, **kwargs):
        seen.clear()
        session(patched, LATENT).sample(
            lambda attend: [attend(*layer, HEADS) for layer in layers], sigmas, **kwargs
        )
        return [seen[at : at + BLOCKS] for at in range(0, len(seen), BLOCKS)]

    return of


@pytest.mark.parametrize("mode", ["manual", "auto quality", "auto budget"])
def test_steps_take_the_orders_in_turn(load_pack, patch, steps_of, mode):
    steps = steps_of(patch(mode=mode), SIX_SPARSE)
    turns = load_pack("sparge").TURNS
    assert len(steps) == 6
    orders = [step[0][0] for step in steps]
    assert all(order is orders[at] for at, step in enumerate(steps) for order, _ in step)
    assert len(set(map(id, orders))) == turns
    assert orders[:turns] == orders[turns:]


def test_manual_mode_takes_rows_between_cubes(load_pack, patch, steps_of):
    plan = load_pack("sparge.plan")
    steps = steps_of(patch(mode="manual"), SIX_SPARSE)
    grid = plan.TokenGrid(*GRID)
    third, first, second = (step[0][0] for step in steps[:3])  # two were dense
    assert third is plan.cube_order(grid, 2)
    assert first is plan.cube_order(grid)
    assert second is plan.unmeasured_order(grid, 1) is not plan.cube_order(grid, 1)


@pytest.mark.parametrize("apart", [([0], [1]), ([0], [0], [1]), ([0, 1], [0, 1], [0, 1])])
def test_all_passes_of_an_evaluation_take_one_turn(load_pack, patch, steps_of, apart):
    """Two prompts, windows of context: in one batch or one by one, as memory allows."""
    passes = steps_of(patch(mode="manual"), SIX_SPARSE, conditionings=apart)
    turns = load_pack("sparge").TURNS
    orders = [step[0][0] for step in passes]
    steps = [orders[at : at + len(apart)] for at in range(0, len(orders), len(apart))]
    assert all(len(set(map(id, step))) == 1 for step in steps)
    assert len({id(step[0]) for step in steps[:turns]}) == turns


def given(steps) -> list[torch.Tensor]:
    """(blocks, heads) densities of each step."""
    return [torch.stack([density for _, density in step]) for step in steps]


@pytest.mark.parametrize("steps", [2, 3, 4, 6])
def test_passes_that_are_measured_have_no_part_in_the_mean(patch, steps_of, runs, steps):
    sigmas = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3][:steps]
    sparse = steps_of(patch(mode="auto budget", topk=0.4, start_percent=0.0), sigmas)
    assert len(sparse) == steps - 1
    (table,) = runs[-1][0].heads.frozen
    assert len(table._given()) == steps - 1
    for densities, choices in zip(given(sparse), table._given(), strict=True):
        assert torch.equal(densities, choices.density[:BLOCKS])


def test_nothing_of_an_order_stays_on_a_device(load_pack, patch, steps_of):
    module = load_pack("sparge.plan.grid")
    for mode in ("manual", "auto quality"):
        steps_of(patch(mode=mode), SIX_SPARSE)
        grid = load_pack("sparge").TokenGrid(*GRID)
        for turn in range(load_pack("sparge").TURNS):
            for order in (module.unmeasured_order(grid, turn), module.grid_order(grid, turn)):
                assert not order._copies


def test_cond_and_uncond_take_the_same_turn(patch, steps_of):
    apart = steps_of(patch(mode="auto quality"), SIX_SPARSE, conditionings=([0], [1]))
    assert all(one[0][0] is other[0][0] for one, other in zip(apart[::2], apart[1::2], strict=True))


def test_a_mean_density_falls_and_a_target_does_not(patch, steps_of, runs):
    falling = given(steps_of(patch(mode="auto budget", topk=0.3), SIX_SPARSE))
    means = torch.stack([step.mean() for step in falling])
    for between_choices in means.split(3):
        assert (between_choices.diff() <= 0).all()
    assert means[0] > means[-1]
    (table,) = runs[-1][0].heads.frozen
    kept = [table._kept_shares(choices.density, 1)[:BLOCKS] for choices in table._given()]
    torch.testing.assert_close(table.density()[:BLOCKS], torch.stack(kept).mean(0))
    errors = torch.stack([choices.error for choices in table._given()])
    assert torch.equal(table.predicted(), errors.double().mean(0).float())

    for widgets in (
        {"mode": "auto quality", "quality": "fast"},
        {"mode": "auto budget", "topk": 0.6},
    ):
        same = given(steps_of(patch(**widgets), SIX_SPARSE[:5]))
        assert all(torch.equal(step, same[0]) for step in same)


def test_a_run_does_not_wait_for_the_garbage_collector(patch, steps_of, runs):
    """Its tables hold memory of the device, which a second sampler needs."""
    steps_of(patch(mode="auto budget", topk=0.4), SIX_SPARSE)
    table = weakref.ref(runs[-1][0].heads.frozen[0])
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
    assert len(set(map(id, orders))) == load_pack("sparge").TURNS


@pytest.mark.parametrize("passes", [[[0]], [[1], [0]], [[0], [0], [1]], [[1, 0]], [[1]]])
@pytest.mark.parametrize("again", [True, False])
def test_heads_are_measured_again_once(load_pack, patch, steps_of, monkeypatch, passes, again):
    """Of the positive prompt, once, where the dense calls afford it."""
    calibrate, cost = load_pack("sparge.calibrate"), load_pack("sparge.plan.sample_cost")
    for name, value in (("LEAST_STEPS", 2), ("LEAST_BLOCKS", 1)):
        monkeypatch.setattr(load_pack("sparge.calibrate.step_choices"), name, value)
    afforded = cost.Afforded(3, again)
    monkeypatch.setattr(
        load_pack("nodes.measured_heads"), "affordable", lambda *args, **kwargs: afforded
    )
    sampled, sample = [], calibrate.Calibration.sample

    def noted(self, layer, *args, dense=None, **kwargs):
        sampled.append((layer, dense is not None, kwargs["calls"]))
        return sample(self, layer, *args, dense=dense, **kwargs)

    monkeypatch.setattr(calibrate.Calibration, "sample", noted)
    steps_of(patch(mode="auto budget", topk=0.4), SIX_SPARSE, conditionings=passes)
    conditionings = {one for each in passes for one in each}
    calls = 2 if len(conditionings) == 1 else 1
    first = [(layer, True, calls) for layer in range(BLOCKS)] * len(conditionings)
    then = [(layer, False, cost.AGAIN_CALLS) for layer in range(BLOCKS)]
    assert sorted(sampled[: len(first)]) == sorted(first)
    assert sampled[len(first) :] == then * (again and 0 in conditionings)
