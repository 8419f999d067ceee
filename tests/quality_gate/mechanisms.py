# SPDX-License-Identifier: Apache-2.0
"""The mechanisms of the auto modes that the quality gate guards, and how each is switched off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from sparge.head_settings import Router
from sparge.order.grid import TokenGrid, TokenOrder
from sparge.order.grid import _order_of_kinds as order_of_kinds
from sparge.order.variants import OrderKind
from sparge.session import choose, heads, measure, measure_kernels

Off = Callable[[], AbstractContextManager[Any]]


def _alike(norms: Tensor, known: Tensor) -> Tensor:
    """Head weights that are all the same."""
    return known[:, None].expand_as(norms).to(norms.dtype)


def _pooled_are_dear() -> AbstractContextManager[Any]:
    costs = measure.Candidates.costs

    def dear(self: measure.Candidates) -> Tensor:
        own = costs(self)
        return torch.stack([own[0], torch.full_like(own[1], 1e9)])

    return patch.object(measure.Candidates, "costs", dear)


def _one_alone(kind: OrderKind) -> AbstractContextManager[Any]:
    def order(grid: TokenGrid, variant: int = 0) -> TokenOrder:
        return order_of_kinds(grid, (kind,), variant)

    return patch.object(heads, "grid_order", order)


@contextmanager
def _ranked_by_mass() -> Iterator[None]:
    by_mass, scores = SimpleNamespace(ERROR=Router.MASS), measure.log_scores

    def of_mass(*given: Any) -> tuple[Tensor, Tensor]:
        mass, _ = scores(*given)
        return mass, mass

    with ExitStack() as stack:
        for module in (choose, measure_kernels):
            stack.enter_context(patch.object(module, "Router", by_mass))
        stack.enter_context(patch.object(measure, "log_scores", of_mass))
        yield


#: Name of a mechanism -> what switches it off, for as long as the context lasts.
MECHANISMS: dict[str, Off] = {
    "output scale": lambda: patch.object(choose, "SCALES", (1.0, 1.0)),
    "head weights": lambda: patch.object(choose, "_head_weight", _alike),
    "pooled keys": _pooled_are_dear,
    "order variants": lambda: patch.object(heads, "VARIANTS", 1),
    "cubes": lambda: _one_alone(OrderKind.ROWS),
    "rows": lambda: _one_alone(OrderKind.CUBES),
    "measuring again": lambda: patch.object(heads, "AGAIN", 0),
    "error routing": _ranked_by_mass,
}
