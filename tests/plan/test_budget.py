# SPDX-License-Identifier: Apache-2.0
"""What a budget per head accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparge import SparsePolicy
from sparge.plan import HeadBudget, Router
from sparge.thresholds import SELECTION


def test_uniform_is_one_value_for_all() -> None:
    budget = HeadBudget.uniform(3, 0.25, gain=0.5, router=Router.ERROR)
    assert budget.heads == 3
    assert budget.density.tolist() == [0.25] * 3
    assert budget.gain.tolist() == [0.5] * 3
    assert budget.router.tolist() == [1] * 3
    assert HeadBudget.uniform(2, 0.1).gain.tolist() == [0, 0], "nothing is pooled unasked"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gain": torch.zeros(2)}, r"gain has shape \(2,\)"),
        ({"router": torch.zeros(3)}, "router has .* torch.float32; give one torch.int32"),
        ({"density": torch.zeros(3, dtype=torch.float64)}, "density has .* give one torch.float32"),
        ({"density": torch.zeros(3, 1)}, r"density has shape \(3, 1\)"),
        ({"floor": 0}, "floor is 0; a query block keeps at least 1"),
    ],
)
def test_other_shapes_and_types_are_refused(change: dict, complaint: str) -> None:
    values: dict[str, Any] = {
        "density": torch.zeros(3),
        "gain": torch.zeros(3),
        "router": torch.zeros(3, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=complaint):
        HeadBudget(**(values | change))


def test_a_budget_made_from_another_has_tables_of_its_own() -> None:
    """A table that was made for other values would say nothing of these, in silence."""
    policy = SparsePolicy()
    budget = HeadBudget.uniform(2, 0.5)
    first = budget.table(policy)
    assert budget.table(policy) is first
    other = replace(budget, density=torch.tensor([0.25, 1.0]))
    assert other.table(policy)[:, SELECTION].tolist() == [0.25, 1.0]
    assert budget.table(policy) is first and first[:, SELECTION].tolist() == [0.5, 0.5]
