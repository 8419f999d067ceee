# SPDX-License-Identifier: Apache-2.0
"""Offers to the heads of a model, and the choice of what each of them gets.

    offers = measurement.offers()  # waits for the GPU
    choices = offers.freeze(mean_density=0.2)

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

from ..head_settings import Router
from . import allocate, curves
from .best_pool_weights import Group, best_pool_weights
from .candidates import CandidateSet
from .choices import HeadChoices
from .head_weights import head_weight
from .side_by_side import side_by_side
from .workload import POOLED_COST, Workload

logger = logging.getLogger("sparge")

#: Ratio of a density that a head may get to the one before: steps of 0.002 at 3 %, 0.015 at 20 %.
DENSITY_RATIO = 1.08


@dataclass(frozen=True, eq=False)
class Offers:
    """Errors and costs of all candidates; made by `of`.

    Candidates are all token orders with all routers and densities. Blocks beyond a density are
    dropped or pooled, as suits the head best (`best_pool_weights`).
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
    rounding: allocate.Array = field(repr=False)
    """(heads of measured layers,): errors by rounding, whatever the head gets."""
    head_weight: allocate.Array = field(repr=False)
    """(heads of measured layers,): head weights, mean 1."""
    pool_weights: allocate.Indices = field(repr=False)
    """(heads of measured layers, candidates): index of each into `CandidateSet.pool_weights`."""
    groups: NDArray[np.int64] = field(repr=False)
    """(candidates,): `Group` of each."""
    costs: allocate.Array = field(repr=False)
    """(candidates,): costs, shares of dense attention."""
    kept: allocate.Array = field(repr=False)
    """(candidates,): shares of pairs."""
    output_scales: allocate.Array = field(repr=False)
    """(heads of measured layers, orders, routers, measured densities, pool weights): scales."""
    places: tuple[allocate.Indices, allocate.Array] = field(repr=False)
    """Places of `densities` among the measured ones, as in `curves.places_between`."""

    @classmethod
    def of(
        cls,
        workload: Workload,
        candidates: CandidateSet,
        errors: allocate.Array,
        output_scales: allocate.Array,
        rounding: allocate.Array,
        norms: allocate.Array,
        samples: Sequence[int],
        order_kinds: Sequence[range],
    ) -> Offers:
        """Makes offers from measurements, with arrays as in `Measurement`.

        errors, output_scales: its relative errors and output scales. rounding, norms: as there.
        samples: of each layer the number of measurements. order_kinds: of each layer the token
        orders that they measured, all that there are errors of or the first.

        Raises:
            ValueError: no layer was measured and gave finite errors.
        """
        measured = (np.asarray(samples) > 0) & np.isfinite(errors).all((1, 2, 3, 4, 5))
        if not measured.any():
            raise ValueError("No layer was measured: call sample in dense calls before freeze.")
        of_layers = [
            of_layer for of_layer, known in zip(order_kinds, measured, strict=True) if known
        ]
        in_some = sorted(set().union(*of_layers))
        densities = _densities(candidates)
        known, kept = (_kept(workload, candidates, x) for x in (candidates.densities, densities))
        of_orders, output_scales = (
            x[measured][:, :, : len(in_some)] for x in (errors, output_scales)
        )
        sampled = np.asarray(samples)[measured]
        everything = kept >= 1  # rounding made the errors there, and would decide between orders
        known_orders = [np.isin(in_some, of_layer) for of_layer in of_layers]
        unknown = ~np.reshape(known_orders, (len(of_layers), 1, len(in_some), 1, 1))

        def best_of(layers: slice) -> tuple[allocate.Array, allocate.Indices]:
            steady = curves.steady(of_orders[layers], sampled[layers])

            def logs_of(pool_weight: int) -> allocate.Array:
                logs = curves.logs_between(steady[..., pool_weight], known, kept)
                logs[..., everything] = -np.inf
                np.copyto(logs, np.inf, where=unknown[layers])
                return logs

            return best_pool_weights(map(logs_of, range(len(candidates.pool_weights))))

        logs, best = side_by_side(best_of, len(of_layers))
        errors = np.exp(logs)
        shape = errors.shape[2:]
        groups = np.arange(shape[-1])
        pools = (groups == Group.POOLED) & ~everything[:, None]
        costs = kept[:, None] + np.where(pools, POOLED_COST, 0)
        return cls(
            in_some,
            densities,
            candidates,
            torch.from_numpy(measured),
            errors.reshape(-1, errors[0, 0].size),
            rounding[measured].ravel(),
            head_weight(norms[measured]).ravel(),
            best.reshape(-1, best[0, 0].size),
            np.broadcast_to(groups, shape).ravel(),
            np.broadcast_to(costs, shape).ravel(),
            np.broadcast_to(kept[:, None], shape).ravel(),
            output_scales.reshape(-1, *output_scales.shape[2:]),
            curves.places_between(known, kept),
        )

    def freeze(
        self, *, target: float | None = None, mean_density: float | None = None
    ) -> HeadChoices:
        """Returns the candidates of least summed error at a mean density over all measured heads.
        That density is given, or is the least that brings the heads' mean error to a `target`.

        Half of the target is left to what is dropped where rounding alone leaves less or misses it:
        keeping everything would gain little there, and cost all.

        Raises:
            ValueError: not exactly one of the two is given.
        """
        if (target is None) == (mean_density is None):
            raise ValueError("Give a target error or a mean density: one of the two.")
        if mean_density is not None:
            return self.choices(self.hulls(mean_density).climb(mean_density))
        assert target is not None
        weights = self.head_weight[:, None]
        whole = np.hypot(self.errors, self.rounding[:, None])
        rounding = (self.head_weight * self.rounding).mean()
        most = max(target, np.hypot(target / 2, rounding)) * self.head_weight.sum()
        chosen = allocate.meet_error(
            self.errors * weights, self.costs, self.kept, whole * weights, most
        )
        return self.choices(chosen)

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

    def choices(self, chosen: allocate.Indices) -> HeadChoices:
        """Head settings of the chosen candidates, one for each head of measured layers."""
        routers, heads = self.candidates.routers, np.arange(len(chosen))
        shape = (
            len(self.order_kinds),
            len(routers),
            len(self.densities),
            int(self.groups.max()) + 1,
        )
        order_kind, router, density, _ = np.unravel_index(chosen, shape)
        pool_weight = self.pool_weights[heads, chosen]
        by_dropping = self.errors[heads, chosen]
        left, share = self.places[0][density], self.places[1][density]
        output_scales = self.output_scales[
            heads, order_kind, router, :, pool_weight
        ]  # (heads, densities)
        output_scale = (1 - share) * output_scales[heads, left] + share * output_scales[
            heads, left + 1
        ]

        def table(values: NDArray[Any], unmeasured: float, dtype: torch.dtype) -> Tensor:
            of_measured = torch.from_numpy(values).to(dtype).view(int(self.measured.sum()), -1)
            full = of_measured.new_full((len(self.measured), of_measured.shape[1]), unmeasured)
            full[self.measured] = of_measured
            return full

        return HeadChoices(
            table(np.asarray(self.densities)[density], 1.0, torch.float32),
            table(np.asarray(self.candidates.pool_weights)[pool_weight], 0.0, torch.float32),
            table(output_scale, 1.0, torch.float32),
            table(np.asarray(routers)[router], int(Router.MASS), torch.int32),
            table(np.asarray(self.order_kinds)[order_kind], 0, torch.int32),
            table(np.hypot(by_dropping, self.rounding), 0.0, torch.float32),
            table(self.head_weight, 0.0, torch.float32),
            self.measured,
            self.candidates.floor,
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
