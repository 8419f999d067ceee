# SPDX-License-Identifier: Apache-2.0
"""Errors of the heads of a model under every candidate, and the choice of what each head gets.

    error_table = measurement.error_table()  # waits for the GPU
    settings = error_table.choose(mean_density=0.2)

A target is the mean error of the heads, each by its weight: quality at a target is the density that
is expected to leave that error. A target for every head by itself would keep nearly everything of
flat heads whose errors hardly show (docs/experiments.md, What a target is of).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import allocate
from .head_weights import head_weight
from .layer_errors import CandidateAxes, LayerErrors
from .settings_table import SettingsTable

logger = logging.getLogger("sparge")

#: Relative L2 error of 8-bit attention that drops nothing (docs/experiments.md, Error of 8 bits
#: alone).
ROUNDING = 0.005


@dataclass(frozen=True, eq=False)
class ErrorTable:
    """Errors and costs of all candidates; made by `of`."""

    axes: CandidateAxes
    measured: Tensor
    """(layers,) bool. Layers that are not measured get no head settings and do not count in the
    mean."""
    errors: allocate.Array = field(repr=False)
    """(heads of measured layers, candidates): errors by dropping."""
    head_weight: allocate.Array = field(repr=False)
    """(heads of measured layers,): head weights, mean 1."""
    costs: allocate.Array = field(repr=False)
    """(candidates,): costs, shares of dense attention."""
    kept: allocate.Array = field(repr=False)
    """(candidates,): shares of pairs."""
    output_scales: allocate.Array = field(repr=False)
    """(heads of measured layers, orders, measured densities, pool weights): scales."""
    steps: allocate.HullSteps = field(repr=False)

    @classmethod
    def of(cls, axes: CandidateAxes, parts: Sequence[LayerErrors]) -> ErrorTable:
        """Makes the table of all layers, one part after the other.

        Raises:
            ValueError: no layer gave finite errors.
        """
        measured, kept = np.concatenate([part.measured for part in parts]), axes.shares()
        if not measured.any():
            raise ValueError("No layer gave finite errors.")
        weights = head_weight(np.concatenate([part.norms for part in parts])).ravel()
        hulls = allocate.Hulls.joined([part.hulls for part in parts])
        return cls(
            axes,
            torch.from_numpy(measured),
            np.concatenate([part.errors for part in parts]),
            weights,
            axes.costs(),
            kept,
            np.concatenate([part.output_scales for part in parts]),
            allocate.HullSteps.of(hulls, weights, kept),
        )

    def choose(
        self, *, target: float | None = None, mean_density: float | None = None
    ) -> SettingsTable:
        """Returns the candidates of least summed error at a mean density over all measured heads.
        That density is given, or is the least that brings the heads' mean error to a `target`.

        Raises:
            ValueError: not exactly one of the two is given.
        """
        if (target is None) == (mean_density is None):
            raise ValueError("Give a target error or a mean density: one of the two.")
        if mean_density is not None:
            return self.settings(self.climb(mean_density))
        assert target is not None
        weights = self.head_weight[:, None]
        whole = np.hypot(self.errors, ROUNDING)
        most = target * self.head_weight.sum()
        return self.settings(
            allocate.meet_error(
                self.steps, self.errors * weights, self.costs, whole * weights, most
            )
        )

    def climb(self, mean_density: float) -> allocate.Indices:
        """Candidates of the heads at a mean density, with a remark in the log where they keep
        more."""
        chosen = self.steps.climb(mean_density)
        if (reached := self.kept[chosen].mean()) > mean_density + allocate.ROUNDING:
            _say_denser(f"{mean_density:.3g}", f"{reached:.3g}")
        return chosen

    def settings(self, chosen: allocate.Indices) -> SettingsTable:
        """Head settings of the chosen candidates, one for each head of measured layers."""
        axes, heads = self.axes, np.arange(len(chosen))
        order_kind, pool_weight, density = np.unravel_index(chosen, axes.shape)
        by_dropping = self.errors[heads, chosen]
        places, shares = axes.places()
        left, share = places[density], shares[density]
        scales = self.output_scales[heads, order_kind, :, pool_weight]  # (heads, densities)
        output_scale = (1 - share) * scales[heads, left] + share * scales[heads, left + 1]

        def table(values: NDArray[Any], unmeasured: float, dtype: torch.dtype) -> Tensor:
            of_measured = torch.from_numpy(values).to(dtype).view(int(self.measured.sum()), -1)
            full = of_measured.new_full((len(self.measured), of_measured.shape[1]), unmeasured)
            full[self.measured] = of_measured
            return full

        return SettingsTable(
            table(np.asarray(axes.densities)[density], 1.0, torch.float32),
            table(np.asarray(axes.candidates.pool_weights)[pool_weight], 0.0, torch.float32),
            table(output_scale, 1.0, torch.float32),
            table(np.asarray(axes.order_kinds)[order_kind], 0, torch.int32),
            table(np.hypot(by_dropping, ROUNDING), 0.0, torch.float32),
            table(self.head_weight, 0.0, torch.float32),
            self.measured,
            router=axes.candidates.router,
        )


@functools.lru_cache(maxsize=64)
def _say_denser(asked: str, kept: str) -> None:
    """Logs it once, although a run chooses several times."""
    logger.warning(
        "A mean density of %s is asked for; text, floors and the least dense candidates already "
        "keep %s.",
        asked,
        kept,
    )
