# SPDX-License-Identifier: Apache-2.0
"""Measuring the heads of a model while it runs dense, and deciding what each of them may drop.

    calibration = Calibration.begin(layers=48, heads=24, workload=Workload(order), device="cuda")
    calibration.sample(layer, q, k, v)              # in dense calls; never waits for the GPU
    choices = calibration.offers().freeze(mean_density=0.2)  # between two steps; waits for the GPU
    budget = choices.budget(layer, "cuda")

One calibration is for one conditioning and one token count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..as_written import as_written
from .candidates import CandidateSet
from .contrast import best_contrasts
from .measure import Measure, Measured, Sample, reference_measure
from .offers import Offers
from .scoring import squared_errors, towards_mean
from .side_by_side import side_by_side
from .spread import ROW_STEP, spread_places
from .workload import Workload

#: Query blocks of every head that one sample measures in each walk. A run with guidance samples
#: cond and uncond, which makes 8. Of 8 blocks, 91 % of DINOv2 video heads predict the error of
#: others within a factor of 1.5, of 4 85 %; and choose better (.0766 instead of .0782 at 10 %;
#: clips of the small video DiT .7 dB better at 10 % and 1.2 at 20 %, as good as with 16 or 40).
BLOCKS_A_CALL = 4
#: Relative L2 error of 8-bit attention that drops nothing (median head of DINOv2 video: .0054),
#: where no sample knew what dense attention gave. Heads of the small video DiT have .002 to .031.
ROUNDING = 0.005


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
    log_backgrounds: Tensor = field(repr=False)
    """(backgrounds,) float32, likewise."""
    measured_walks: range
    """Of the workload's order, those that there are sums of."""
    squared_error: Tensor
    """(layers, heads, measured walks, routers, densities, kinds) float32, summed over rows and
    channels: the largest tensors that are kept, of few terms."""
    towards_mean: Tensor
    """The same shape: products of errors with what the exact output lacks of the mean value."""
    squared_norm: Tensor
    """(2, layers, heads, measured walks) float64, of the exact output and of that lack."""
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
        row_step: of so many rows of them one is compared, as `spread_rows` has them.
        visited: query blocks that another one has sampled; this goes on with those after them.
        walks: of the workload's order, those to measure and to choose from; `worth_measuring` where
            none are given.

        Raises:
            ValueError: no query block of the workload may drop anything.
        """
        candidates = candidates or CandidateSet()
        if workload.is_causal:  # the mean value of all keys is of later ones too
            candidates = replace(candidates, backgrounds=(), contrasts=(1.0, 1.0))
        query_blocks = workload.sparse_query_blocks()
        if not query_blocks:
            raise ValueError("Every query block holds exact tokens: leave this attention dense.")
        measured = worth_measuring(workload.order.walks) if walks is None else walks
        sums = torch.zeros(
            layers, heads, len(measured), *candidates.shape, dtype=torch.float32, device=device
        )
        return cls(
            workload,
            candidates,
            query_blocks,
            blocks_a_call,
            row_step,
            measure,
            torch.tensor(candidates.gains, dtype=torch.float32, device=device).log(),
            torch.tensor(candidates.backgrounds, dtype=torch.float32, device=device).log(),
            measured,
            sums,
            torch.zeros_like(sums),
            torch.zeros(2, layers, heads, len(measured), dtype=torch.float64, device=device),
            torch.zeros(2, layers, heads, dtype=torch.float64, device=device),
            [0] * layers,
            visited,
            [measured] * layers,
        )

    def anew(self) -> Calibration:
        """One like this that knows nothing yet, and looks at other query blocks. Allocates."""
        like = Calibration.begin(
            layers=len(self.samples),
            heads=self.squared_norm.shape[2],
            workload=self.workload,
            candidates=self.candidates,
            blocks_a_call=self.blocks_a_call,
            row_step=self.row_step,
            visited=self.visited + max(self.samples),
            walks=self.measured_walks,
            measure=self.measure,
            device=self.squared_norm.device,
        )
        like.walks[:] = self.walks
        return like

    def fill_from(self, earlier: Calibration) -> None:
        """Takes from one of the same kind what is not known here: layers that were not sampled, or
        gave something not finite, and rounding, which only dense calls tell. Waits for the GPU."""
        sums = (self.squared_error, self.towards_mean, self.squared_norm.transpose(0, 1))
        finite = torch.stack([x.isfinite().flatten(1).all(1) for x in sums]).all(0).tolist()
        for layer, (known, walks) in enumerate(zip(earlier.samples, earlier.walks, strict=True)):
            if not (self.samples[layer] and finite[layer]):
                self.samples[layer], self.walks[layer] = known, walks
                self.squared_error[layer].copy_(earlier.squared_error[layer])
                self.towards_mean[layer].copy_(earlier.towards_mean[layer])
                self.squared_norm[:, layer].copy_(earlier.squared_norm[:, layer])
        self.squared_rounding.copy_(earlier.squared_rounding)

    def measure_one_walk(self) -> None:
        """The first. Call it before any `sample`: walks that were measured in different calls do
        not compare."""
        assert not any(self.samples)
        self.walks[:] = [self.measured_walks[:1]] * len(self.walks)

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
            self.walks[layer] = self.measured_walks[:1]
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
        with as_written(q.device):
            self._add(layer, self.measure(sample), with_rounding=dense is not None)
        self.samples[layer] += len(blocks)

    def next_query_blocks(self, layer: int, calls: int = 1) -> list[int]:
        """Query blocks that the next `sample` of `layer` measures, on the host."""
        # Neighbouring layers look at other blocks.
        first = self.visited + self.samples[layer] + layer
        places = spread_places(len(self.query_blocks), first, calls * self.blocks_a_call)
        return [self.query_blocks[place] for place in places]

    def _add(self, layer: int, measured: Measured, *, with_rounding: bool) -> None:
        empty, of_layer = ~measured.occupied, self.walks[layer]
        walks = slice(len(of_layer))  # all of the measured ones, or the first
        found = measured.distances
        for of_kinds, sums in (
            (squared_errors, self.squared_error),
            (towards_mean, self.towards_mean),
        ):
            of_rows = of_kinds(found, self.log_gains, self.log_backgrounds)
            # First in float32: as float64 these would not fit in the memory of a sample.
            of_blocks = of_rows.masked_fill_(empty.unsqueeze(-1), 0).sum(-2)
            del of_rows
            of_heads = of_blocks.sum((3, 5), dtype=torch.float64)
            sums[layer, :, walks].add_(of_heads.movedim((3, 2), (0, 1)))
        of_rows = torch.stack([found.norm, found.background_far, found.rounding])
        squares = of_rows.masked_fill_(empty, 0).sum((2, 4, 5), dtype=torch.float64)
        self.squared_norm[:, layer, :, walks].add_(squares[:2].movedim(1, 2))
        if with_rounding:
            self.squared_rounding[:, layer].add_(squares[::2, 0])

    def relative_errors(self) -> NDArray[np.float64]:
        """The first of `errors_and_contrasts`."""
        return self.errors_and_contrasts()[0]

    def errors_and_contrasts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(layers, heads, measured walks, routers, densities, kinds), twice: relative L2 errors
        with the contrasts, and those.

        The root of the ratio of sums rather than a mean of ratios: both choose equally well, and
        with 16 query blocks the sums predict the error within a factor of 1.5 for 95 % of DINOv2
        video heads, the ratios for 91 %. Waits for the GPU.
        """
        norms, far = self.squared_norm.cpu().numpy()[..., None, None, None]
        error, towards = (x.cpu().numpy() for x in (self.squared_error, self.towards_mean))

        def of(layers: slice) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            made, lacking = (x[layers].astype(np.float64) for x in (error, towards))
            limits = self.candidates.contrasts
            contrasts, squares = best_contrasts(made, lacking, far[layers], limits)
            own = norms[layers]
            with np.errstate(invalid="ignore"):  # what is not finite stays so, and is not measured
                shares = np.divide(squares, own, out=np.zeros_like(squares), where=own != 0)
                return np.sqrt(shares), contrasts

        errors, contrasts = side_by_side(of, len(error))
        return errors, contrasts

    def rounding(self) -> NDArray[np.float64]:
        """(layers, heads): relative L2 error that 8 bits alone make. Waits for the GPU."""
        norms, squares = self.squared_rounding.cpu().numpy()
        with np.errstate(invalid="ignore"):
            measured = np.sqrt(
                np.divide(squares, norms, out=np.zeros_like(norms), where=norms != 0)
            )
        return np.where((norms != 0) & np.isfinite(measured), measured, ROUNDING)

    def norms(self) -> NDArray[np.float64]:
        """(layers, heads): norm of the exact output, of as many query blocks each. Waits for the
        GPU."""
        squares = self.squared_norm[0].cpu().numpy().max(-1)  # 0 in walks that were not measured
        return np.sqrt(squares / np.maximum(self.samples, 1)[:, None])

    def offers(self) -> Offers:
        """What the heads can be given, as far as it is known so far. Waits for the GPU.

        Layers that were not sampled, or gave something not finite, are not measured.

        Raises:
            ValueError: no layer was measured.
        """
        return Offers.of(
            self.workload,
            self.candidates,
            *self.errors_and_contrasts(),
            self.rounding(),
            self.norms(),
            self.samples,
            self.walks,
        )


def worth_measuring(walks: int) -> range:
    """Of so many walks through a grid cubes and rows: on the small video DiT squares of a frame
    bring nothing beside them (clips 0-3, H200, in dB, with squares and without, of budgets 10 / 20
    / 30 / 50 %: 28.7 / 32.9 / 36.0 / 43.0 and 28.6 / 32.9 / 36.4 / 43.5; cubes alone 27.9 / 32.5 /
    36.6 / 41.5), and on DINOv2 video all heads take cubes."""
    return range(walks) if walks < 3 else range(0, walks, walks - 1)
