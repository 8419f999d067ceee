# SPDX-License-Identifier: Apache-2.0
"""The mechanisms of the auto modes that the quality gate guards, and how each is switched off."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np

from sparge.head_settings import Router
from sparge.order.variants import Walk
from sparge.tune import Calibration, CandidateSet, StepChoices, head_table, offers

Off = Callable[[], AbstractContextManager[Any]]

MEASURED_BY = Calibration.begin.__func__  # type: ignore[attr-defined]


def _measured_with(**given: object) -> AbstractContextManager[Any]:
    """Every measurement of heads begins with these arguments."""

    def begin(cls: type[Calibration], **own: object) -> Calibration:
        return MEASURED_BY(cls, **own | given)

    return patch.object(Calibration, "begin", classmethod(begin))


def _orders(first: int, end: int) -> Off:
    return lambda: _measured_with(walks=range(first, end))


def _candidates(**fields: Any) -> Off:
    return lambda: _measured_with(candidates=CandidateSet(**fields))


def _never_measured_again() -> AbstractContextManager[Any]:
    begin = StepChoices.__init__

    def without(self: StepChoices, *given: Any, **own: Any) -> None:
        begin(self, *given, **own | {"again": 0})

    return patch.object(StepChoices, "__init__", without)


#: Name of a mechanism -> what switches it off, for as long as the context lasts.
MECHANISMS: dict[str, Off] = {
    "output scale": _candidates(contrasts=(1.0, 1.0)),
    "head weights": lambda: patch.object(offers, "loudness", np.ones_like),
    "pooled keys": _candidates(gains=(0.0,)),
    "order variants": lambda: patch.object(head_table, "TURNS", 1),
    "cubes": _orders(Walk.RASTER, Walk.RASTER + 1),
    "rows": _orders(Walk.CUBES, Walk.CUBES + 1),
    "measuring again": _never_measured_again,
    "error routing": _candidates(routers=(Router.MASS,)),
}
