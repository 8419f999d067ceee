# SPDX-License-Identifier: Apache-2.0
"""The mechanisms of the auto modes that the quality gate guards, and how each is switched off."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np

from sparge.head_settings import Router
from sparge.order.variants import OrderKind
from sparge.tune import CandidateSet, Measurement, StepSettings, error_table, head_table

Off = Callable[[], AbstractContextManager[Any]]

MEASURED_BY = Measurement.begin.__func__  # type: ignore[attr-defined]


def _measured_with(**given: object) -> AbstractContextManager[Any]:
    """Every measurement of heads begins with these arguments."""

    def begin(cls: type[Measurement], **own: object) -> Measurement:
        return MEASURED_BY(cls, **own | given)

    return patch.object(Measurement, "begin", classmethod(begin))


def _orders(first: int, end: int) -> Off:
    return lambda: _measured_with(order_kinds=range(first, end))


def _candidates(**fields: Any) -> Off:
    return lambda: _measured_with(candidates=CandidateSet(**fields))


def _never_measured_again() -> AbstractContextManager[Any]:
    begin = StepSettings.__init__

    def without(self: StepSettings, *given: Any, **own: Any) -> None:
        begin(self, *given, **own | {"again": 0})

    return patch.object(StepSettings, "__init__", without)


#: Name of a mechanism -> what switches it off, for as long as the context lasts.
MECHANISMS: dict[str, Off] = {
    "output scale": _candidates(output_scales=(1.0, 1.0)),
    "head weights": lambda: patch.object(error_table, "head_weight", np.ones_like),
    "pooled keys": _candidates(pool_weights=(0.0,)),
    "order variants": lambda: patch.object(head_table, "VARIANTS", 1),
    "cubes": _orders(OrderKind.ROWS, OrderKind.ROWS + 1),
    "rows": _orders(OrderKind.CUBES, OrderKind.CUBES + 1),
    "measuring again": _never_measured_again,
    "error routing": _candidates(router=Router.MASS),
}
