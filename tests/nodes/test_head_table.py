# SPDX-License-Identifier: Apache-2.0
"""Measurements of a table of conditionings whose tensors differ."""

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
def table_of(load_pack, grid):
    """table_of(layers, rows): a table of two heads, half of whose blocks are to be computed."""
    module, tune = load_pack("sparge.tune.head_table"), load_pack("sparge.tune")
    policy, device = load_pack("sparge").SparsePolicy(), torch.device("cpu")

    def made(layers):
        shape = module.Shape(grid.tokens, 2, grid)
        run = load_pack("sparge.tune.ways").RunLength(layers, None)
        aim = tune.Aim("budget", 0.5)
        return module.HeadTable(shape, layers, aim, policy, device, tune.Ways(), run, nullcontext)

    return made


@pytest.fixture
def chosen(load_pack, table_of):
    """chosen(*passes): the settings after passes of (conditioning, q, k, v) in a dense step."""
    tune = load_pack("sparge.tune")

    def run(*passes):
        table = table_of(1)
        for conditioning, *qkv in passes:
            table.begin_pass(tune.PassFacts(conditioning, 0, "before start_percent", True))
            own, call = partial(scaled_dot_product_attention, *qkv), tune.Call(*qkv)
            table.measuring.measure(0, call, tune.Ways().choice(call), tune.DenseOnce(own))
        table.begin_pass(tune.PassFacts(passes[0][0], 1))
        return table.settings

    return run


def test_conditionings_are_measured_alike_in_a_batch_and_apart(call_of, chosen):
    """Their tensors differ, and so do the token orders that suit them."""
    uncond, cond = call_of(ROWS, CUBES), call_of(CUBES, CUBES)
    both = [torch.cat(each) for each in zip(uncond, cond, strict=True)]
    batch = chosen(((1, 0), *both))
    apart = chosen(((1,), *uncond), ((0,), *cond))
    alone = chosen(((1,), *uncond))
    assert alone.order_kind.tolist() == [[ROWS, CUBES]]
    assert batch.order_kind.tolist() == [[CUBES, CUBES]]
    kinds = ("pool_weight", "output_scale", "order_kind")
    for name in ("density", *kinds, "error", "head_weight"):
        assert torch.equal(getattr(batch, name), getattr(apart, name)), name
    for name in ("error", "head_weight"):
        of_one = getattr(alone, name)
        assert not torch.equal(of_one, getattr(apart, name)), f"{name} of both conditionings"


def test_a_row_that_was_not_expected_is_not_measured(load_pack, table_of):
    table, why = table_of(3), load_pack("sparge.tune.head_measuring").NOT_MEASURED
    assert [table.head_settings(row) for row in (2, 3)] == [why, why]
