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


@pytest.fixture
def uncomputed(load_pack, monkeypatch):
    """Sparse calls are checked and give zeros: what they are asked is all that counts here, and
    the reference would take most of the time."""
    reference = load_pack("sparge.stages.on_reference")
    monkeypatch.setattr(reference, "attend", lambda given, *_: (torch.zeros(given.q.shape), None))


@pytest.fixture
def steps_of(uncomputed, sampled, asked, generator):
    """steps_of(sigmas, **widgets): the sparse calls, by pass and block, and the run."""
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)
    # Keys that are alike in space, so that another block is worth the less the more are kept.
    drift = torch.linspace(0, 30, TOKENS)[:, None] + torch.arange(HEADS * 64)
    layers[:, :2] += 2 * drift.sin()

    def of(sigmas, **given):
        asked.clear()

        def step(attend):
            return [attend(*layer, HEADS) for layer in layers]

        got = sampled(step, sigmas, latent=LATENT, **{"min_tokens": TOKENS} | given)
        return [asked[at : at + BLOCKS] for at in range(0, len(asked), BLOCKS)], got

    return of


def orders_of(passes):
    return [calls[0].order for calls in passes]


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
    order = load_pack("sparge.order.grid")
    grid = order.TokenGrid(*GRID)
    third, first, second, *_ = orders_of(steps_of(SIX_SPARSE)[0])  # two were dense
    assert third is order.unmeasured_order(grid, 2)
    assert first is order.unmeasured_order(grid, 0)
    assert second is order.unmeasured_order(grid, 1)


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


def test_a_run_does_not_wait_for_the_garbage_collector(steps_of, runs):
    """Its heads hold memory of the device, which a second sampler needs."""
    got = steps_of(SIX_SPARSE[:4], topk=0.4, mode="auto budget")[1]
    (heads_of_shape,) = got.run.heads.by_shape.values()
    run, heads = weakref.ref(got.run), weakref.ref(heads_of_shape)
    gc.disable()
    try:
        del got, heads_of_shape
        runs.clear()
        assert run() is heads() is None
    finally:
        gc.enable()
