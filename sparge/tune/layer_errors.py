# SPDX-License-Identifier: Apache-2.0
"""Errors of the heads of some layers under every candidate.

Layers are worked out in groups, because the GPU measures the later ones meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from . import curves
from .allocate import Array, Hulls, Indices
from .candidates import CandidateSet, kept_ranks
from .workload import POOLED_COST, Workload

#: Ratio of a density that a head may get to the one before: steps of 0.002 at 3 %, 0.015 at 20 %.
DENSITY_RATIO = 1.08


@dataclass(frozen=True, eq=False)
class CandidateAxes:
    """Axes of all candidates: token orders, pool weights and densities, the last one."""

    order_kinds: list[int]
    """Token orders that some layer measured."""
    candidates: CandidateSet
    densities: list[float]
    """Densities that a head may get: the measured ones and those between."""
    measured: Array
    """Shares of pairs that the measured densities really keep, forced blocks included."""
    kept: Array
    """Shares of pairs that `densities` really keep."""

    @classmethod
    def of(
        cls, workload: Workload, candidates: CandidateSet, order_kinds: Sequence[range]
    ) -> CandidateAxes:
        """order_kinds: token orders that each measured layer measured."""
        densities = _densities(candidates)
        measured, kept = (
            workload.density(kept_ranks(each, workload.key_blocks))
            for each in (candidates.densities, densities)
        )
        in_some = sorted(set().union(*order_kinds))
        return cls(in_some, candidates, densities, measured, kept)

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.order_kinds), len(self.candidates.pool_weights), len(self.densities)

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """(densities,): nothing is dropped there, so no token order is better."""
        return self.kept >= 1

    def costs(self) -> Array:
        """(candidates,): costs, shares of dense attention."""
        pools = (np.asarray(self.candidates.pool_weights) > 0)[:, None] & ~self.is_whole
        return np.broadcast_to(self.kept + np.where(pools, POOLED_COST, 0), self.shape).ravel()

    def shares(self) -> Array:
        """(candidates,): shares of pairs that are kept."""
        return np.broadcast_to(self.kept, self.shape).ravel()

    def places(self) -> tuple[Indices, Array]:
        """Places of `densities` among the measured ones, as in `curves.places_between`."""
        return curves.places_between(self.measured, self.kept)


@dataclass(frozen=True, eq=False)
class LayerErrors:
    """Errors of the measured layers among some, made by `of`."""

    measured: NDArray[np.bool_]
    """(layers,): whether a layer was measured and gave finite errors."""
    errors: Array = field(repr=False)
    """(heads of measured layers, candidates): errors by dropping."""
    output_scales: Array = field(repr=False)
    """(heads of measured layers, orders, measured densities, pool weights): scales."""
    norms: Array = field(repr=False)
    """(measured layers, heads): norms of the exact outputs."""
    hulls: Hulls = field(repr=False)

    @classmethod
    def of(
        cls,
        axes: CandidateAxes,
        errors: Array,
        output_scales: Array,
        norms: Array,
        blocks_measured: Sequence[int],
        order_kinds: Sequence[range],
    ) -> LayerErrors:
        """Works out the errors of layers from what was measured of them, as in `FetchedSums`.

        blocks_measured: of each layer the number of measured query blocks. order_kinds: of each
        layer the token orders that they were measured in, all that there are errors of or the
        first.
        """
        blocks, orders = np.asarray(blocks_measured), len(axes.order_kinds)
        measured = (blocks > 0) & np.isfinite(errors).all((1, 2, 3, 4))
        of_orders, output_scales = (x[measured][:, :, :orders] for x in (errors, output_scales))
        steady = curves.steady(of_orders, blocks[measured])
        by_density = np.ascontiguousarray(np.moveaxis(steady, -2, -1))
        between = curves.errors_between(by_density, axes.measured, axes.kept)
        between[..., axes.is_whole] = 0
        of_layers = [kinds for kinds, known in zip(order_kinds, measured, strict=True) if known]
        unknown = [[kind not in kinds for kind in axes.order_kinds] for kinds in of_layers]
        where = np.array(unknown, dtype=bool).reshape(-1, 1, orders, 1, 1)
        np.copyto(between, np.inf, where=where)
        of_heads = between.reshape(-1, math.prod(axes.shape))
        return cls(
            measured,
            of_heads,
            output_scales.reshape(-1, *output_scales.shape[2:]),
            norms[measured],
            Hulls.of(of_heads, axes.costs()),
        )


def _densities(candidates: CandidateSet) -> list[float]:
    """Densities that a head may get: the measured ones and those between."""
    steps = np.arange(0, np.log(1 / candidates.densities[0]), np.log(DENSITY_RATIO))
    between = candidates.densities[0] * np.exp(steps)
    return np.unique(np.concatenate([between, candidates.densities]).round(6)).tolist()
