# SPDX-License-Identifier: Apache-2.0
"""Values of head settings, and their tables."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparge import SparsePolicy
from sparge.head_settings import HeadSettings, Router
from sparge.thresholds import COLUMNS, SELECTION


def test_ranking_by_error_reads_pooled_keys() -> None:
    assert not HeadSettings.uniform(2, 0.1).pools
    assert HeadSettings.uniform(2, 0.5, 0.0, Router.ERROR).pools


def test_each_value_has_its_own_column_and_settings_made_from_others_their_own_table() -> None:
    settings = HeadSettings(
        density=torch.tensor([0.25, 0.5]),
        pool_weight=torch.tensor([0.5, 4.0]),
        router=torch.tensor([1, 0], dtype=torch.int32),
        output_scale=torch.tensor([0.75, 1.5]),
    )
    policy = SparsePolicy(topk=0.9, simthreshd1=0.625, pvthreshd=9.0)
    table = settings.table(policy)
    expected = {
        "selection": [0.25, 0.5], "simthreshd1": [0.625, 0.625], "pvthreshd": [9.0, 9.0],
        "log2_pool_weight": [-1.0, 2.0], "router": [1.0, 0.0], "output_scale": [0.75, 1.5],
    }  # fmt: skip
    assert dict(zip(COLUMNS, table.T.tolist(), strict=True)) == expected
    other = replace(settings, density=torch.tensor([0.3125, 1.0]))
    assert other.table(policy)[:, SELECTION].tolist() == [0.3125, 1.0]
    assert settings.table(policy) is table and table[:, SELECTION].tolist() == [0.25, 0.5]


def test_orders_lie_as_kernels_read_them() -> None:
    order_kind = torch.tensor([[0, 2], [0, 1]], dtype=torch.int32)[:, 1]
    found = replace(HeadSettings.uniform(2, 0.5), order_kind=order_kind).order_kind
    assert found is not None and found.is_contiguous() and found.tolist() == [2, 1]
