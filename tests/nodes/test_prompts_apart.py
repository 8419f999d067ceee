# SPDX-License-Identifier: Apache-2.0
"""Measurements of prompts whose tensors differ."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("reference_allowed")

CUBES, ROWS = range(2)


@pytest.fixture
def grid(load_pack):
    return load_pack("sparge").TokenGrid(8, 16, 16)


@pytest.fixture
def call_of(load_pack, grid, generator):
    """call_of(*order_kinds): q, k, v of two heads, keys alike in blocks of these orders."""
    order = load_pack("sparge").grid_order(grid)

    def made(*order_kinds: int) -> list[Tensor]:
        q, k, v = torch.randn(3, 1, 2, grid.tokens, 32, generator=generator)
        for head, order_kind in enumerate(order_kinds):
            block = order.token_slots[order_kind].long() // 64
            k[0, head] = 2 * torch.randn(order.key_blocks, 32, generator=generator)[block]
        return [q, k, v]

    return made


@pytest.fixture
def chosen(load_pack, grid):
    """chosen(*passes): the settings of two heads, half of whose blocks are to be computed, after
    passes of (prompts, q, k, v) in a dense step."""
    module, session = load_pack("sparge.session.heads"), load_pack("sparge.session")
    policy, device = load_pack("sparge").SparsePolicy(), torch.device("cpu")

    def run(*passes):
        aim, shape = session.Aim("budget", 0.5), module.Shape(grid.tokens, 2, grid)
        heads = module.Heads(shape, aim, policy, device, (), nullcontext)
        for prompts, *qkv in passes:
            heads.begin_pass(session.Step(prompts, 0, "before start_percent", True))
            own = partial(scaled_dot_product_attention, *qkv)
            heads.measure(0, session.Call(*qkv), None, own, nullcontext)
        heads.begin_pass(session.Step(passes[0][0], 1))
        return heads.settings

    return run


def test_prompts_are_measured_alike_in_a_batch_and_apart(call_of, chosen):
    """Their tensors differ, and so do the token orders that suit them."""
    uncond, cond = call_of(ROWS, CUBES), call_of(CUBES, CUBES)
    both = [torch.cat(each) for each in zip(uncond, cond, strict=True)]
    batch = chosen(((1, 0), *both))
    apart = chosen(((1,), *uncond), ((0,), *cond))
    alone = chosen(((1,), *uncond))
    assert alone.order_kind.tolist() == [[[ROWS, CUBES]]]
    assert batch.order_kind.tolist() == [[[CUBES, CUBES]]]
    kinds = ("pool_weight", "output_scale", "order_kind")
    for name in ("density", *kinds, "error", "weight"):
        assert torch.equal(getattr(batch, name), getattr(apart, name)), name
    for name in ("error", "weight"):
        of_one = getattr(alone, name)
        assert not torch.equal(of_one, getattr(apart, name)), f"{name} of both prompts"
