# SPDX-License-Identifier: Apache-2.0
"""Sums of a measurement on the host, and the errors of heads that follow from them.

fetched = measurement.fetched          # copies, which each `add` begins
error_table = fetched.error_table()    # waits for one group of layers after the other
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .candidates import CandidateSet
from .error_table import ErrorTable
from .layer_errors import CandidateAxes, LayerErrors
from .output_scale import best_output_scales
from .workload import Workload

Array = NDArray[np.float64]


#: Layers that are worked out at once, while the GPU measures those after them.
LAYERS_AT_ONCE = 8


@dataclass(frozen=True, eq=False)
class FetchedSums:
    """Copies of a measurement's sums, layer by layer; its methods wait until those are there."""

    workload: Workload
    candidates: CandidateSet
    sums: tuple[Tensor, Tensor, Tensor]
    """squared_error, towards_mean and squared_norm of `Measurement`, on the CPU."""
    blocks_measured: list[int]
    """Number of query blocks measured of each layer."""
    order_kinds: list[range]
    """Token orders measured of each layer."""
    copied: list[torch.cuda.Event | None]
    """Event of each layer behind its copies; None where there is nothing to wait for."""

    @classmethod
    def of(
        cls,
        workload: Workload,
        candidates: CandidateSet,
        sums: Sequence[Tensor],
        blocks_measured: list[int],
        order_kinds: list[range],
    ) -> FetchedSums:
        """Room for copies of sums."""
        error, towards, squares = (
            torch.zeros_like(x, device="cpu", pin_memory=x.is_cuda) for x in sums
        )
        copies, layers = (error, towards, squares), len(blocks_measured)
        return cls(workload, candidates, copies, blocks_measured, order_kinds, [None] * layers)

    def _arrived(self, layers: slice = slice(None)) -> tuple[Array, Array, Array]:
        for event in self.copied[layers]:
            if event is not None:
                event.synchronize()
        error, towards, squares = (x[layers].numpy() for x in self.sums)
        return error, towards, squares

    def fill_from(self, earlier: FetchedSums) -> None:
        """Copies from `earlier`, of the same kind, what is not known here: layers that were not
        measured or gave something not finite."""
        own, others = self._arrived(), earlier._arrived()
        finite = [np.isfinite(x).reshape(len(x), -1).all(1) for x in own]
        known = np.all(finite, 0) & (np.array(self.blocks_measured) > 0)
        for layer in np.flatnonzero(~known):
            self.blocks_measured[layer] = earlier.blocks_measured[layer]
            self.order_kinds[layer] = earlier.order_kinds[layer]
            for mine, other in zip(own, others, strict=True):
                mine[layer] = other[layer]

    def errors_and_scales(self, layers: slice = slice(None)) -> tuple[Array, Array]:
        """Relative L2 errors with output scale, and the output scales.

        Both are (layers, heads, measured orders, densities, pool weights). An error is the root of
        the ratio of sums, which predicts better than a mean of ratios (docs/experiments.md, Sums or
        ratios).
        """
        error, towards, squares = (x.astype(np.float64) for x in self._arrived(layers))
        norms, far = np.moveaxis(squares, 1, 0)[..., None, None]
        limits = self.candidates.output_scales
        output_scales, found = best_output_scales(error, towards, far, limits)
        with np.errstate(invalid="ignore"):  # stays so, and is not measured
            shares = np.divide(found, norms, out=np.zeros_like(found), where=norms != 0)
            return np.sqrt(shares), output_scales

    def norms(self, layers: slice = slice(None)) -> Array:
        """(layers, heads) norm of the exact output, over equally many query blocks each."""
        squares = self._arrived(layers)[2][:, 0].max(-1)  # 0 in orders that were not measured
        return np.sqrt(squares / np.maximum(self.blocks_measured[layers], 1)[:, None])

    def error_table(self) -> ErrorTable:
        """Makes the table of all heads.

        Layers that were not measured, or gave something not finite, are not in it.

        Raises:
            ValueError: no layer was measured and gave finite errors.
        """
        count = len(self.blocks_measured)
        known = [self.order_kinds[layer] for layer in range(count) if self.blocks_measured[layer]]
        if not known:
            raise ValueError("No layer was measured: call `add` in dense calls before `choose`.")
        axes = CandidateAxes.of(self.workload, self.candidates, known)
        firsts = range(0, count, LAYERS_AT_ONCE)
        parts = (slice(first, first + LAYERS_AT_ONCE) for first in firsts)
        return ErrorTable.of(axes, [self._errors_of(axes, layers) for layers in parts])

    def _errors_of(self, axes: CandidateAxes, layers: slice) -> LayerErrors:
        return LayerErrors.of(
            axes,
            *self.errors_and_scales(layers),
            self.norms(layers),
            self.blocks_measured[layers],
            self.order_kinds[layers],
        )
