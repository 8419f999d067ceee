# SPDX-License-Identifier: Apache-2.0
"""Values that head settings accept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparge import SparsePolicy
from sparge import head_settings as budget_module
from sparge.head_settings import KEPT_TABLES, HeadSettings, Router
from sparge.thresholds import COLUMNS, SELECTION
from sparge.tune.layer_settings import LayerSettings


def test_uniform_is_one_value_for_all() -> None:
    head_settings = HeadSettings.uniform(3, 0.25, pool_weight=0.5, router=Router.ERROR)
    assert head_settings.heads == 3
    assert head_settings.density.tolist() == [0.25] * 3
    assert head_settings.pool_weight.tolist() == [0.5] * 3
    assert head_settings.router.tolist() == [1] * 3
    assert HeadSettings.uniform(2, 0.1).pool_weight.tolist() == [0, 0], "nothing is pooled unasked"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"pool_weight": torch.zeros(2)}, r"pool_weight has shape \(2,\)"),
        ({"router": torch.zeros(3)}, "router has .* torch.float32; give one torch.int32"),
        ({"density": torch.zeros(3, dtype=torch.float64)}, "density has .* give one torch.float32"),
        ({"density": torch.zeros(3, 1)}, r"density has shape \(3, 1\)"),
        ({"floor": 0}, "floor is 0; it takes a whole number from 1"),
    ],
)
def test_other_shapes_and_types_are_refused(change: dict, complaint: str) -> None:
    values: dict[str, Any] = {
        "density": torch.zeros(3),
        "pool_weight": torch.zeros(3),
        "router": torch.zeros(3, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=complaint):
        HeadSettings(**(values | change))


def test_a_budget_made_from_another_has_tables_of_its_own() -> None:
    """A table that was made for other values would say nothing of these, in silence."""
    policy = SparsePolicy()
    head_settings = HeadSettings.uniform(2, 0.5)
    first = head_settings.table(policy)
    assert head_settings.table(policy) is first
    other = replace(head_settings, density=torch.tensor([0.25, 1.0]))
    assert other.table(policy)[:, SELECTION].tolist() == [0.25, 1.0]
    assert head_settings.table(policy) is first and first[:, SELECTION].tolist() == [0.5, 0.5]


def test_each_value_has_its_own_column() -> None:
    head_settings = HeadSettings(
        density=torch.tensor([0.25, 0.5]),
        pool_weight=torch.tensor([0.5, 4.0]),
        router=torch.tensor([1, 0], dtype=torch.int32),
        output_scale=torch.tensor([0.75, 1.5]),
    )
    table = head_settings.table(SparsePolicy(topk=0.9, simthreshd1=0.625, pvthreshd=9.0))
    columns = dict(zip(COLUMNS, table.T.tolist(), strict=True))
    assert columns == {
        "selection": [0.25, 0.5],
        "simthreshd1": [0.625, 0.625],
        "pvthreshd": [9.0, 9.0],
        "log2_pool_weight": [-1.0, 2.0],
        "router": [1.0, 0.0],
        "output_scale": [0.75, 1.5],
    }


def policies(count: int) -> list[SparsePolicy]:
    return [SparsePolicy(simthreshd1=index / count) for index in range(count)]


@pytest.mark.parametrize("recorded", [False, True])
def test_many_policies_keep_the_tables_asked_for_last_and_recorded(
    recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded calls read theirs where it lies, whatever is asked for later."""
    head_settings, usual = HeadSettings.uniform(2, 0.5), SparsePolicy(pvthreshd=7.0)
    table = head_settings.table(usual)
    if recorded:
        monkeypatch.setattr(budget_module, "being_recorded", lambda device: True)
        head_settings.table(usual)
        monkeypatch.undo()
    for policy in policies(1000):
        head_settings.table(policy)
        assert recorded or head_settings.table(usual) is table, "it is asked for all the time"
    assert head_settings.table(usual) is table
    assert len(head_settings._tables) == KEPT_TABLES + recorded


def test_budgets_of_layers_go_on_sharing_their_table() -> None:
    policy = SparsePolicy()
    of_all = HeadSettings.uniform(4, 0.5)
    layers = LayerSettings(of_all, [True, True], policy)
    for each in (of_all, layers[0], layers[1]):
        assert each is not None
        for other in policies(2 * KEPT_TABLES):
            each.table(other)
    table = of_all.table(policy)
    for layer, heads in zip(layers, (slice(2), slice(2, 4)), strict=True):
        assert layer is not None
        assert layer.table(policy).data_ptr() == table[heads].data_ptr()


def test_orders_lie_as_kernels_read_them_on_one_device() -> None:
    order_kind = torch.tensor([[0, 2], [0, 1]], dtype=torch.int32)[:, 1]
    head_settings = replace(HeadSettings.uniform(2, 0.5), order_kind=order_kind)
    assert head_settings.order_kind is not None and head_settings.order_kind.is_contiguous()
    assert head_settings.order_kind.tolist() == [2, 1]
    with pytest.raises(
        ValueError, match="order_kind is on meta and density on cpu: put all values"
    ):
        replace(head_settings, order_kind=torch.zeros(2, dtype=torch.int32, device="meta"))
