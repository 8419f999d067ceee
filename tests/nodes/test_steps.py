# SPDX-License-Identifier: Apache-2.0
"""What changes from one sparse step to the next: the order of tokens and the densities."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("reference_allowed")

HEADS, BLOCKS = 2, 2
LATENT = (4, 16, 16)
TOKENS = 4 * 8 * 8
SIX_SPARSE = [1.0, 0.9, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]


class WanModel(torch.nn.LayerNorm):
    """A model whose name and sizes tell the node the grid; nothing of it runs."""

    patch_size, num_heads, blocks = (1, 2, 2), HEADS, range(BLOCKS)


@pytest.fixture
def patch(load_pack, patcher):
    """patch(**widgets): a patched patcher."""
    patcher.model.diffusion_model = WanModel(8)
    execute = load_pack("nodes.sparge_attention").SpargeAttention.execute
    return lambda **widgets: execute(patcher, min_tokens=TOKENS, **widgets)[0]


@pytest.fixture
def steps_of(load_pack, monkeypatch, session, generator):
    """steps_of(patched, sigmas): orders and densities of the sparse calls, by step and block."""
    module = load_pack("nodes.attention_call")
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)
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


@pytest.fixture
def frozen_means(load_pack, monkeypatch):
    """The mean densities of each time that choices were made."""
    calibration = load_pack("sparge.calibrate").Calibration
    freeze, seen = calibration.freeze_each, []

    def spy(self, means):
        seen.append(list(means))
        return freeze(self, means)

    monkeypatch.setattr(calibration, "freeze_each", spy)
    return seen


@pytest.mark.parametrize("mode", ["manual", "auto quality", "auto budget"])
def test_steps_take_the_orders_in_turn(load_pack, patch, steps_of, mode):
    steps = steps_of(patch(mode=mode), SIX_SPARSE)
    turns = load_pack("sparge").TURNS
    assert len(steps) == 6
    orders = [step[0][0] for step in steps]
    assert all(order is orders[at] for at, step in enumerate(steps) for order, _ in step)
    assert len(set(map(id, orders))) == turns
    assert orders[:turns] == orders[turns:]


@pytest.mark.parametrize("apart", [([0], [1]), ([0], [0], [1]), ([0, 1], [0, 1], [0, 1])])
def test_all_passes_of_an_evaluation_take_one_turn(load_pack, patch, steps_of, apart):
    """Two prompts, windows of context: in one batch or one by one, as memory allows."""
    passes = steps_of(patch(mode="manual"), SIX_SPARSE, conditionings=apart)
    turns = load_pack("sparge").TURNS
    orders = [step[0][0] for step in passes]
    steps = [orders[at : at + len(apart)] for at in range(0, len(orders), len(apart))]
    assert all(len(set(map(id, step))) == 1 for step in steps)
    assert len({id(step[0]) for step in steps[:turns]}) == turns


@pytest.mark.parametrize("steps", [2, 3, 4, 6])
def test_passes_that_are_measured_have_no_part_in_the_mean(
    load_pack, patch, steps_of, runs, frozen_means, steps
):
    sigmas = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3][:steps]
    sparse = steps_of(patch(mode="auto budget", topk=0.4, start_percent=0.0), sigmas)
    assert len(sparse) == steps - 1
    (means,) = frozen_means
    assert means == [0.4, *load_pack("sparge.calibrate").step_means(0.4, steps - 1)]
    assert sum(means[1:]) / len(means[1:]) == pytest.approx(0.4)
    table = runs[-1][0].heads.frozen[0]
    for at, step in enumerate(sparse):
        given = table._of_steps[at] if steps > 2 else table.choices
        assert torch.equal(torch.stack([density for _, density in step]), given.density[:BLOCKS])


def test_nothing_of_an_order_stays_on_a_device(load_pack, patch, steps_of):
    module = load_pack("sparge.plan.grid")
    for mode in ("manual", "auto quality"):
        steps_of(patch(mode=mode), SIX_SPARSE)
        grid = load_pack("sparge").TokenGrid(4, 8, 8)
        for turn in range(load_pack("sparge").TURNS):
            for order in (module.cube_order(grid, turn), module.grid_order(grid, turn)):
                assert not order._copies


def test_cond_and_uncond_take_the_same_turn(patch, steps_of):
    apart = steps_of(patch(mode="auto quality"), SIX_SPARSE, conditionings=([0], [1]))
    assert all(one[0][0] is other[0][0] for one, other in zip(apart[::2], apart[1::2], strict=True))


def test_a_mean_density_falls_and_a_target_does_not(patch, steps_of, frozen_means):
    steps_of(patch(mode="auto budget", topk=0.3), SIX_SPARSE)
    (means,) = frozen_means
    overall, first, *_, last = means
    assert len(means) == 1 + 6 and overall == 0.3
    assert (first, last) == pytest.approx((0.3 * 1.3, 0.3 * 0.7))
    quality = steps_of(patch(mode="auto quality", quality="fast"), SIX_SPARSE[:5])
    once = [density for _, density in quality[0]]
    assert all(torch.equal(a, b[1]) for step in quality for a, b in zip(once, step, strict=True))
    assert len(frozen_means) == 1


def test_densities_of_a_profile_fall_too(load_pack, patch, steps_of, runs, session, generator):
    module = load_pack("nodes.head_table")
    choices = load_pack("sparge.calibrate").HeadChoices(
        *(torch.full((1, 2), value) for value in (0.3, 0.0)),
        *(torch.zeros(1, 2, dtype=torch.int32) for _ in "rw"),
        torch.zeros(1, 2),
        torch.ones(1, dtype=torch.bool),
    )
    grid = load_pack("sparge").TokenGrid(8, 16, 16)
    aim = load_pack("nodes.aim").Aim("budget", 0.3)
    policy = load_pack("sparge").SparsePolicy()
    shape = module.Shape(grid.tokens, 2, grid)
    table = module.HeadTable(shape, 1, aim, policy, torch.device("cpu"))
    table.use(choices)
    facts, place = load_pack("nodes.passes").PassFacts, load_pack("nodes.decision").Place
    falling = load_pack("sparge.calibrate").falling
    for step in range(5):
        table.begin_pass(facts((0,), step, place=place(step, 5)))
        expected = falling(choices.density, step / 4, shape.workload().key_blocks)
        assert torch.equal(table.budget(0).density, expected[0])
    assert torch.equal(table.choices.density, choices.density), "the profile is as it was"
