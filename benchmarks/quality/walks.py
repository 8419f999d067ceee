# SPDX-License-Identifier: Apache-2.0
"""Head settings whose heads take different token orders, one order at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparge.head_settings import HeadBudget


def by_walk(budget: HeadBudget) -> list[tuple[int, HeadBudget]]:
    """Token orders that heads take, from the least, each with the head settings as if all heads
    took it."""
    plain = replace(budget, walk=None)
    return [(walk, plain) for walk in _walks(budget)]


def of_heads(budget: HeadBudget, values: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Values of each head for its own token order, along `dim`; values in the order of
    `by_walk`.
    """
    assert budget.walk is not None
    places = torch.searchsorted(torch.tensor(_walks(budget)), budget.walk.cpu().long())
    parts = [values[place].select(dim, head) for head, place in enumerate(places.tolist())]
    return torch.stack(parts, dim)


def _walks(budget: HeadBudget) -> list[int]:
    return [0] if budget.walk is None else sorted(set(budget.walk.tolist()))
