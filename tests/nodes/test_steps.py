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


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_passes_that_are_measured_have_no_part_in_the_mean(load_pack, patch, steps_of, runs, steps):
    sigmas = [0.6, 0.5, 0.4, 0.3][:steps]
    sparse = steps_of(patch(mode="auto budget", topk=0.4, start_percent=0.0), sigmas)
    assert len(sparse) == steps - 1
    (table,) = runs[-1][0].heads.frozen
    asked, blocks = table.choices.density[:BLOCKS], table.shape.workload().key_blocks
    falling = load_pack("sparge.calibrate").falling
    for at, step in enumerate(sparse):
        kept = torch.stack([density for _, density in step])
        expected = falling(asked, at / (steps - 2), blocks) if steps > 2 else asked
        assert torch.equal(kept, expected)


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


def test_a_mean_density_falls_and_a_target_does_not(load_pack, patch, steps_of, runs):
    budget = steps_of(patch(mode="auto budget", topk=0.5), SIX_SPARSE)
    kept = torch.stack([torch.stack([density for _, density in step]) for step in budget])
    means = kept.flatten(1).mean(1)
    assert (means.diff() <= 0).all() and means[0] > means[-1]
    (table,) = runs[-1][0].heads.frozen
    asked = table.choices.density[:BLOCKS]
    falling = load_pack("sparge.calibrate").falling
    blocks = table.shape.workload().key_blocks
    for at, step in enumerate(kept):
        assert torch.equal(step, falling(asked, at / 5, blocks))
    quality = steps_of(patch(mode="auto quality", quality="fast"), SIX_SPARSE[:5])
    first = [density for _, density in quality[0]]
    assert all(torch.equal(a, b[1]) for step in quality for a, b in zip(first, step, strict=True))
