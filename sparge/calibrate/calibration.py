# SPDX-License-Identifier: Apache-2.0
"""Measuring the heads of a model while it runs dense, and deciding what each of them may drop.

    calibration = Calibration.begin(layers=48, heads=24, workload=Workload(order), device="cuda")
    calibration.sample(layer, q, k, v)              # in dense calls; never waits for the GPU
    choices = calibration.freeze(mean_density=0.2)  # once, between two steps; waits for the GPU
    budget = choices.budget(layer, "cuda")

One calibration is for one conditioning and one token count.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..plan.budget import Router
from . import budgets, curves
from .candidates import CandidateSet
from .choices import HeadChoices
from .fall import step_means
from .measure import Measure, Measured, Sample, reference_measure
from .scoring import squared_errors
from .spread import spread_places
from .workload import RESIDUAL_COST, Workload

logger = logging.getLogger("sparge")

#: Query blocks of every head that one sample measures in each walk. A run with guidance samples
#: cond and uncond, which makes 8. Of 8 blocks, 91 % of DINOv2 video heads predict the error of
#: others within a factor of 1.5, of 4 85 %; and choose better (.0766 instead of .0782 at 10 %;
#: clips of the small video DiT .7 dB better at 10 % and 1.2 at 20 %, as good as with 16 or 40).
BLOCKS_A_CALL = 4
#: Rows of a query block that one is compared by. Every second one of 8 blocks tells as much as all
#: (DINOv2 video at 20 %: .0391, .0389), every fourth one less (.0408): one column of a cube.
ROW_STEP = 2
#: Relative L2 error of 8-bit attention that drops nothing (median head of DINOv2 video: .0054),
#: where no sample knew what dense attention gave. Heads of the small video DiT have .002 to .031.
ROUNDING = 0.005
#: Of one density that a head may get to the next: steps of .002 at 3 %, .015 at 20 %.
DENSITY_RATIO = 1.08


@dataclass(frozen=True, eq=False)
class _Offers:
    """What heads can be given: errors by dropping (heads, candidates), costs and kept shares
    (candidates,); and their errors by rounding (heads,), whatever they are given."""

    errors: budgets.Array
    rounding: budgets.Array
    costs: budgets.Array
    kept: budgets.Array
    densities: list[float]
    measured: Tensor
    """(layers,) bool."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Sums over the query blocks sampled so far; make it with `begin`."""

    workload: Workload
    candidates: CandidateSet
    query_blocks: list[int] = field(repr=False)
    """Those worth a sample."""
    blocks_a_call: int
    row_step: int
    measure: Measure
    log_gains: Tensor = field(repr=False)
    """(gains,) float32, natural: of the candidates, on the device."""
    squared_error: Tensor
    """(layers, heads, walks, routers, densities, gains) float64, summed over rows and channels."""
    squared_norm: Tensor
    """(layers, heads, walks) float64, of the exact output."""
    squared_rounding: Tensor
    """(2, layers, heads) float64, of what was compared with dense attention: squared norm, and
    squared distance from it."""
    samples: list[int] = field(repr=False)
    """Query blocks sampled of each layer, in each walk."""
    visited: int = field(repr=False)
    walks: list[range] = field(repr=False)
    """Walks measured of each layer: the first alone where heads share keys, since those have to
    share a walk."""

    @classmethod
    def begin(
        cls,
        *,
        layers: int,
        heads: int,
        workload: Workload,
        candidates: CandidateSet | None = None,
        blocks_a_call: int = BLOCKS_A_CALL,
        row_step: int = ROW_STEP,
        visited: int = 0,
        walks: range | None = None,
        measure: Measure = reference_measure,
        device: torch.device | str = "cpu",
    ) -> Calibration:
        """Allocates all that calibration keeps, so call it where sampling or a forward starts.

        blocks_a_call: query blocks (of every head) that one `sample` measures.
        row_step: every so many-th row of them is compared; a divisor of 128.
        visited: query blocks that another one has sampled; this goes on with those after them.
        walks: of the workload's order, those to measure and to choose from; `worth_measuring` where
            none are given.

        Raises:
            ValueError: no query block of the workload may drop anything.
        """
        candidates = candidates or CandidateSet()
        query_blocks = workload.sparse_query_blocks()
        if not query_blocks:
            raise ValueError("Every query block holds exact tokens: leave this attention dense.")
        count = workload.order.walks
        sums = torch.zeros(
            layers, heads, count, *candidates.shape, dtype=torch.float64, device=device
        )
        return cls(
            workload,
            candidates,
            query_blocks,
            blocks_a_call,
            row_step,
            measure,
            torch.tensor(candidates.gains, device=device).log(),
            sums,
            torch.zeros(layers, heads, count, dtype=torch.float64, device=device),
            torch.zeros(2, layers, heads, dtype=torch.float64, device=device),
            [0] * layers,
            visited,
            [walks or worth_measuring(count)] * layers,
        )

    def anew(self) -> Calibration:
        """One like this that knows nothing yet, and looks at other query blocks. Allocates."""
        like = Calibration.begin(
            layers=len(self.samples),
            heads=self.squared_norm.shape[1],
            workload=self.workload,
            candidates=self.candidates,
            blocks_a_call=self.blocks_a_call,
            row_step=self.row_step,
            visited=self.visited + max(self.samples),
            measure=self.measure,
            device=self.squared_norm.device,
        )
        like.walks[:] = self.walks
        return like

    def fill_from(self, earlier: Calibration) -> None:
        """Takes from one of the same kind what is not known here: layers that were not sampled, and
        rounding, which only dense calls tell. Never waits for the GPU."""
        for layer, (known, walks) in enumerate(zip(earlier.samples, earlier.walks, strict=True)):
            if not self.samples[layer]:
                self.samples[layer], self.walks[layer] = known, walks
                self.squared_error[layer].copy_(earlier.squared_error[layer])
                self.squared_norm[layer].copy_(earlier.squared_norm[layer])
        self.squared_rounding.copy_(earlier.squared_rounding)

    def measure_one_walk(self) -> None:
        """The first. Call it before any `sample`: walks that were measured in different calls do
        not compare."""
        assert not any(self.samples)
        self.walks[:] = [range(1)] * len(self.walks)

    def sample(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        key_lengths: Tensor | None = None,
        dense: Tensor | None = None,
        calls: int = 1,
    ) -> None:
        """Measure all candidates on a few query blocks of q (B, H, N, D) over k, v (B, Hkv, N, D).

        dense: (B, H, N, D), what dense attention gave; it tells how far off a head is that drops
        nothing.
        calls: as many query blocks as so many samples measure.

        Other blocks in every call and layer, evenly spread, the same in every run. Batch entries
        count as one. Errors are against the same arithmetic with nothing dropped. All walks of the
        workload's order, or some of them, are measured in the same call: the error
        of a head can halve from one step to the next, so walks measured in different steps do not
        compare. (Choosing the walk from the keys alone costs a third and leaves smaller errors in
        calls, but clips of the small DiT 1.1 dB further from dense ones.)
        """
        blocks = self.next_query_blocks(layer, calls)
        softmax_scale = q.shape[-1] ** -0.5 if scale is None else scale
        if k.shape[1] != q.shape[1]:
            self.walks[layer] = range(1)
        sample = Sample(
            q,
            k,
            v,
            blocks,
            self.workload,
            self.candidates,
            softmax_scale,
            key_lengths,
            self.walks[layer],
            self.row_step,
            dense,
        )
        self._add(layer, self.measure(sample), with_rounding=dense is not None)
        self.samples[layer] += len(blocks)

    def next_query_blocks(self, layer: int, calls: int = 1) -> list[int]:
        """Query blocks that the next `sample` of `layer` measures, on the host."""
        first = (
            self.visited + self.samples[layer] + layer
        )  # neighbouring layers look at other blocks
        places = spread_places(len(self.query_blocks), first, calls * self.blocks_a_call)
        return [self.query_blocks[place] for place in places]

    def _add(self, layer: int, measured: Measured, *, with_rounding: bool) -> None:
        empty, of_layer = ~measured.occupied, self.walks[layer]
        walks = slice(of_layer.start, of_layer.stop, of_layer.step)
        errors = squared_errors(measured.distances, self.log_gains)
        errors = errors.masked_fill_(empty.unsqueeze(-1), 0).sum((3, 5, 6), dtype=torch.float64)
        self.squared_error[layer, :, walks].add_(errors.movedim((3, 2), (0, 1)))
        of_rows = torch.stack([measured.distances.norm, measured.distances.rounding])
        squares = of_rows.masked_fill_(empty, 0).sum((2, 4, 5), dtype=torch.float64)
        self.squared_norm[layer, :, walks].add_(squares[0].T)
        if with_rounding:
            self.squared_rounding[:, layer].add_(squares[:, 0])

    def relative_errors(self) -> NDArray[np.float64]:
        """(layers, heads, walks, routers, densities, gains): relative L2 errors.

        The root of the ratio of sums rather than a mean of ratios: both choose equally well, and
        with 16 query blocks the sums predict the error within a factor of 1.5 for 95 % of DINOv2
        video heads, the ratios for 91 %. Waits for the GPU.
        """
        norms = self.squared_norm.cpu().numpy()[..., None, None, None]
        squares = self.squared_error.cpu().numpy()
        with np.errstate(invalid="ignore"):  # what is not finite stays so, and is not measured
            return np.sqrt(np.divide(squares, norms, out=np.zeros_like(squares), where=norms != 0))

    def rounding(self) -> NDArray[np.float64]:
        """(layers, heads): relative L2 error that 8 bits alone make. Waits for the GPU."""
        norms, squares = self.squared_rounding.cpu().numpy()
        with np.errstate(invalid="ignore"):
            measured = np.sqrt(
                np.divide(squares, norms, out=np.zeros_like(norms), where=norms != 0)
            )
        return np.where((norms != 0) & np.isfinite(measured), measured, ROUNDING)

    def freeze(
        self,
        *,
        target: float | None = None,
        mean_density: float | None = None,
        drift: Tensor | None = None,
    ) -> HeadChoices:
        """The cheapest candidate of each head within `target` relative L2 error, or those of least
        summed error at a `mean_density` over all measured heads. Waits for the GPU.

        drift: (layers, heads) float64 on the CPU, how many times as large as measured the errors by
        dropping of each head have become since.

        Layers that were not sampled, or gave something not finite, are not measured: they get no
        budget and do not count in the mean.

        Raises:
            ValueError: not exactly one of the two is given, or no layer was measured.
        """
        if (target is None) == (mean_density is None):
            raise ValueError("Give a target error or a mean density: one of the two.")
        if target is None:
            assert mean_density is not None
            return self.freeze_steps(mean_density, 1, drift=drift)[0]
        offers = self._offers(drift)
        by_dropping = budgets.left_for_dropping(target, offers.rounding)[:, None]
        return self._choices(budgets.meet_target(offers.errors, offers.costs, by_dropping), offers)

    def freeze_steps(
        self, mean_density: float, steps: int, *, first: int = 0, drift: Tensor | None = None
    ) -> tuple[HeadChoices, list[HeadChoices]]:
        """`freeze` at a mean density over so many sparse steps: the choices as if all were alike,
        and those of each step from the `first` on where they are not (`step_means`)."""
        offers = self._offers(drift)
        means = step_means(mean_density, steps, float(offers.kept.min()))
        alike = len(means) == 1
        means = means if alike else means[first:]
        overall, *of_steps = budgets.share_density(
            offers.errors, offers.costs, offers.kept, [mean_density, *means]
        )
        reached = offers.kept[overall].mean()
        if reached > mean_density + budgets.ROUNDING:
            logger.warning(
                "A mean density of %.3g is asked for; text, floors and the least dense "
                "candidates already keep %.3g.",
                mean_density,
                reached,
            )
        of_steps = [] if alike else [self._choices(chosen, offers) for chosen in of_steps]
        return self._choices(overall, offers), of_steps

    def _offers(self, drift: Tensor | None) -> _Offers:
        samples = np.asarray(self.samples)
        errors = self.relative_errors()
        measured = (samples > 0) & np.isfinite(errors).all((1, 2, 3, 4, 5))
        if not measured.any():
            raise ValueError("No layer was measured: call sample in dense calls before freeze.")
        densities = _densities(self.candidates)
        kept = self._kept(densities)
        errors = curves.steady(errors[measured], samples[measured])
        errors = curves.between(errors, self._kept(self.candidates.densities), kept)
        of_layers = [walks for walks, known in zip(self.walks, measured, strict=True) if known]
        for layer, walks in zip(errors, of_layers, strict=True):
            layer[:, np.isin(range(layer.shape[1]), walks, invert=True)] = np.inf
        by_head = errors.reshape(-1, errors[0, 0].size)
        if drift is not None:
            by_head = by_head * drift.numpy()[measured].reshape(-1, 1)
        costs, kept = self._costs(kept)
        rounding = self.rounding()[measured].ravel()
        return _Offers(by_head, rounding, costs, kept, densities, torch.from_numpy(measured))

    def _kept(self, densities: Sequence[float]) -> budgets.Array:
        """The share of pairs that each density really keeps, forced blocks included."""
        shares = CandidateSet(tuple(densities), floor=self.candidates.floor)
        return self.workload.density(shares.kept_ranks(self.workload.key_blocks))

    def _costs(self, kept: budgets.Array) -> tuple[budgets.Array, budgets.Array]:
        """Cost and share of kept pairs of each candidate."""
        routers, gains = self.candidates.routers, np.asarray(self.candidates.gains)
        residual = np.where((gains > 0) & (kept[:, None] < 1), RESIDUAL_COST, 0)
        shape = (self.workload.order.walks, len(routers), *residual.shape)
        cost = np.broadcast_to(kept[:, None] + residual, shape)
        return cost.ravel(), np.broadcast_to(kept[:, None], shape).ravel()

    def _choices(self, chosen: budgets.Indices, offers: _Offers) -> HeadChoices:
        densities, measured = offers.densities, offers.measured
        routers, gains = self.candidates.routers, self.candidates.gains
        shape = (self.workload.order.walks, len(routers), len(densities), len(gains))
        walk, router, density, gain = np.unravel_index(chosen, shape)

        def table(values: NDArray[Any], unmeasured: float, dtype: torch.dtype) -> Tensor:
            full = torch.full(self.squared_norm.shape[:2], unmeasured, dtype=dtype)
            full[measured] = torch.from_numpy(values).to(dtype).view(-1, full.shape[1])
            return full

        by_dropping = offers.errors[np.arange(len(chosen)), chosen]
        return HeadChoices(
            table(np.asarray(densities)[density], 1.0, torch.float32),
            table(np.asarray(gains)[gain], 0.0, torch.float32),
            table(np.asarray(routers)[router], int(Router.MASS), torch.int32),
            table(walk, 0, torch.int32),
            table(np.hypot(by_dropping, offers.rounding), 0.0, torch.float32),
            measured,
            self.candidates.floor,
        )


def worth_measuring(walks: int) -> range:
    """Of so many walks through a grid cubes and rows: on the small video DiT squares of a frame
    bring nothing beside them (clips 0-3, H200, in dB, with squares and without, of budgets 10 / 20
    / 30 / 50 %: 28.7 / 32.9 / 36.0 / 43.0 and 28.6 / 32.9 / 36.4 / 43.5; cubes alone 27.9 / 32.5 /
    36.6 / 41.5), and on DINOv2 video all heads take cubes."""
    return range(walks) if walks < 3 else range(0, walks, walks - 1)


def _densities(candidates: CandidateSet) -> list[float]:
    """The measured densities and those between, all of which a head may get."""
    steps = np.arange(0, np.log(1 / candidates.densities[0]), np.log(DENSITY_RATIO))
    between = candidates.densities[0] * np.exp(steps)
    return np.unique(np.concatenate([between, candidates.densities]).round(6)).tolist()
