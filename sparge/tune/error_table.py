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
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import allocate, curves
from .candidates import CandidateSet
from .head_weights import head_weight
from .settings_table import SettingsTable
from .workload import POOLED_COST, Workload

logger = logging.getLogger("sparge")

#: Ratio of a density that a head may get to the one before: steps of 0.002 at 3 %, 0.015 at 20 %.
DENSITY_RATIO = 1.08
#: Relative L2 error of 8-bit attention that drops nothing (docs/experiments.md, Error of 8 bits
#: alone).
ROUNDING = 0.005


@dataclass(frozen=True, eq=False)
class ErrorTable:
    """Errors and costs of all candidates; made by `of`.

    Candidates are all token orders with all densities and pool weights.
    """

    order_kinds: list[int]
    """Token orders that some layer measured."""
    densities: list[float]
    candidates: CandidateSet
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
    places: tuple[allocate.Indices, allocate.Array] = field(repr=False)
    """Places of `densities` among the measured ones, as in `curves.places_between`."""

    @classmethod
    def of(
        cls,
        workload: Workload,
        candidates: CandidateSet,
        errors: allocate.Array,
        output_scales: allocate.Array,
        norms: allocate.Array,
        blocks_measured: Sequence[int],
        order_kinds: Sequence[range],
    ) -> ErrorTable:
        """Makes a table from measurements, with arrays as in `Measurement`.

        errors, output_scales, norms: of `Measurement`. blocks_measured: of each layer the number of
        measurements. order_kinds: of each layer the token orders that they measured, all that there
        are errors of or the first.

        Raises:
            ValueError: no layer was measured and gave finite errors.
        """
        measured = (np.asarray(blocks_measured) > 0) & np.isfinite(errors).all((1, 2, 3, 4))
        if not measured.any():
            raise ValueError("No layer was measured: call `add` in dense calls before `choose`.")
        of_layers = [
            of_layer for of_layer, known in zip(order_kinds, measured, strict=True) if known
        ]
        in_some = sorted(set().union(*of_layers))
        densities = _densities(candidates)
        known, kept = (_kept(workload, candidates, x) for x in (candidates.densities, densities))
        of_orders, output_scales = (
            x[measured][:, :, : len(in_some)] for x in (errors, output_scales)
        )
        steady = curves.steady(of_orders, np.asarray(blocks_measured)[measured])
        between = np.exp(curves.logs_between(np.moveaxis(steady, -1, -2), known, kept))
        everything = kept >= 1  # nothing is dropped there, so no token order is better
        between[..., everything] = 0
        unknown = ~np.array([np.isin(in_some, of_layer) for of_layer in of_layers])
        np.copyto(between, np.inf, where=unknown[:, None, :, None, None])
        pools = (np.asarray(candidates.pool_weights) > 0) & ~everything[:, None]
        shape = (len(in_some), len(densities), len(candidates.pool_weights))
        return cls(
            in_some,
            densities,
            candidates,
            torch.from_numpy(measured),
            np.moveaxis(between, -1, -2).reshape(-1, math.prod(shape)),
            head_weight(norms[measured]).ravel(),
            np.broadcast_to(kept[:, None] + np.where(pools, POOLED_COST, 0), shape).ravel(),
            np.broadcast_to(kept[:, None], shape).ravel(),
            output_scales.reshape(-1, *output_scales.shape[2:]),
            curves.places_between(known, kept),
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
            return self.settings(self.hulls(mean_density).climb(mean_density))
        assert target is not None
        weights = self.head_weight[:, None]
        whole = np.hypot(self.errors, ROUNDING)
        most = target * self.head_weight.sum()
        chosen = allocate.meet_error(
            self.errors * weights, self.costs, self.kept, whole * weights, most
        )
        return self.settings(chosen)

    def hulls(self, mean_density: float) -> allocate.HullSteps:
        """Hull steps, with a remark in the log where a run keeps more than the mean density that
        was asked."""
        hulls = allocate.HullSteps.of(
            self.errors * self.head_weight[:, None], self.costs, self.kept
        )
        most = mean_density + allocate.ROUNDING
        if self.kept[hulls.cheapest].mean() > most:
            reached = self.kept[hulls.climb(mean_density)].mean()
            if reached > most:
                _say_denser(f"{mean_density:.3g}", f"{reached:.3g}")
        return hulls

    def settings(self, chosen: allocate.Indices) -> SettingsTable:
        """Head settings of the chosen candidates, one for each head of measured layers."""
        heads = np.arange(len(chosen))
        shape = (len(self.order_kinds), len(self.densities), len(self.candidates.pool_weights))
        order_kind, density, pool_weight = np.unravel_index(chosen, shape)
        by_dropping = self.errors[heads, chosen]
        left, share = self.places[0][density], self.places[1][density]
        scales = self.output_scales[heads, order_kind, :, pool_weight]  # (heads, densities)
        output_scale = (1 - share) * scales[heads, left] + share * scales[heads, left + 1]

        def table(values: NDArray[Any], unmeasured: float, dtype: torch.dtype) -> Tensor:
            of_measured = torch.from_numpy(values).to(dtype).view(int(self.measured.sum()), -1)
            full = of_measured.new_full((len(self.measured), of_measured.shape[1]), unmeasured)
            full[self.measured] = of_measured
            return full

        return SettingsTable(
            table(np.asarray(self.densities)[density], 1.0, torch.float32),
            table(np.asarray(self.candidates.pool_weights)[pool_weight], 0.0, torch.float32),
            table(output_scale, 1.0, torch.float32),
            table(np.asarray(self.order_kinds)[order_kind], 0, torch.int32),
            table(np.hypot(by_dropping, ROUNDING), 0.0, torch.float32),
            table(self.head_weight, 0.0, torch.float32),
            self.measured,
            self.candidates.floor,
            self.candidates.router,
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


def _kept(
    workload: Workload, candidates: CandidateSet, densities: Sequence[float]
) -> allocate.Array:
    """Share of pairs that each density really keeps, forced blocks included."""
    shares = CandidateSet(tuple(densities), floor=candidates.floor)
    return workload.density(shares.kept_ranks(workload.key_blocks))


def _densities(candidates: CandidateSet) -> list[float]:
    """Densities that a head may get: the measured ones and those between."""
    steps = np.arange(0, np.log(1 / candidates.densities[0]), np.log(DENSITY_RATIO))
    between = candidates.densities[0] * np.exp(steps)
    return np.unique(np.concatenate([between, candidates.densities]).round(6)).tolist()
