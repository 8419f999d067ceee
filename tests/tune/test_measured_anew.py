# SPDX-License-Identifier: Apache-2.0
"""Heads measured once more: what that does not tell comes from the first time."""

from __future__ import annotations

import pytest
import torch

from tests.tune.begun import begin

NAMES = ("squared_error", "towards_mean")


def test_at_other_query_blocks_it_takes_the_rest_from_the_first(qkv) -> None:
    first = begin(layers=2, blocks_a_call=1)
    first.measure_one_order()
    for layer in range(2):
        first.add(layer, *qkv)
    again = first.anew()
    assert not any(again.blocks_measured) and again.order_kinds == first.order_kinds
    assert again.next_query_blocks(1) == first.next_query_blocks(1)
    again.add(1, *qkv)
    assert not torch.equal(again.squared_error[1], first.squared_error[1])
    own = [getattr(again, name)[1].clone() for name in NAMES]
    again.fill_from(first)
    for name, before in zip(NAMES, own, strict=True):
        assert torch.equal(getattr(again, name)[0], getattr(first, name)[0])
        assert torch.equal(getattr(again, name)[1], before)
    assert torch.equal(again.squared_norm[:, 0], first.squared_norm[:, 0])
    assert again.blocks_measured == first.blocks_measured
    assert again.error_table().choose(mean_density=0.5).measured.all()


@pytest.mark.parametrize("bad", [[1], [0, 1]], ids=["one layer", "all layers"])
def test_what_is_not_finite_is_not_taken_for_measured(qkv, bad: list[int]) -> None:
    first = begin(layers=2, blocks_a_call=1)
    again = first.anew()
    q, k, v = qkv
    broken = v.clone()
    broken[:, -1, :, 0] = float("nan")
    for layer in range(2):
        first.add(layer, *qkv)
        again.add(layer, q, k, broken if layer in bad else v)
    good = again.squared_error[0].clone()
    again.fill_from(first)
    for name in NAMES:
        for layer in bad:
            assert torch.equal(getattr(again, name)[layer], getattr(first, name)[layer])
    assert 0 in bad or torch.equal(again.squared_error[0], good)
    assert again.error_table().choose(mean_density=0.5).measured.all()
