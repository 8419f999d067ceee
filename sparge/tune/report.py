# SPDX-License-Identifier: Apache-2.0
"""Report of a session, in numbers on the CPU, and its lines for a reader."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..order.variants import OrderKind
from .aim import Aim
from .head_weights import mean_error
from .measured_shape import MeasuredShape
from .records import Densities, RunTime

#: Remark on results that are no numbers.
NAN_IN_SPARSE = (
    "NaN in the results of sparse calls: see whether it stays when all calls are dense, as the "
    "model may give it by itself"
)
BLOCKS_OF = {OrderKind.CUBES: "cubes", OrderKind.ROWS: "rows"}


@dataclass(frozen=True, eq=False)
class Report:
    """Densities, errors and reasons of one run."""

    aim: Aim | None
    densities: Densities
    shapes: tuple[MeasuredShape, ...]
    """Measured heads, one entry for each shape of calls."""
    reasons: Mapping[str, int]
    """Number of dense calls by the reason why they were not sparse, the most frequent first."""
    time: RunTime
    has_nan: bool = False
    """Whether some result of a sparse call held NaN, which an infinity makes, too."""

    @cached_property
    def layers(self) -> Tensor:
        """(layers,) int64: number of each layer with self-attention."""
        return self.densities.layers

    @property
    def by_step(self) -> Tensor:
        """(layers, steps) float32: share of attention that was computed, NaN in steps without
        any."""
        return self.densities.by_step[self.layers]

    def of_heads(self, name: str) -> Tensor:
        """(heads of all shapes and layers,) of one table of `MeasuredShape`, without NaN."""
        joined = self._joined(name)
        return joined[~joined.isnan()]

    def mean_error(self, name: str) -> float | None:
        """Mean by head weight, over the heads of all shapes and layers whose error is known, if
        any."""
        return mean_error(self._joined(name), self._joined("head_weight"))

    def of_layers(self, name: str) -> dict[int, float]:
        """Mean error of each layer whose error is known, likewise."""
        found: dict[int, list[Tensor]] = {}
        for shape in self.shapes:
            heads = torch.stack([getattr(shape, name), shape.head_weight])
            for place, layer in enumerate(shape.layers.tolist()):
                found.setdefault(layer, []).append(heads[:, place])
        means = {layer: mean_error(*torch.cat(heads, 1)) for layer, heads in found.items()}
        return {layer: mean for layer, mean in means.items() if mean is not None}

    def _joined(self, name: str) -> Tensor:
        values = [getattr(shape, name).flatten() for shape in self.shapes]
        return torch.cat(values) if values else torch.empty(0, device="cpu")

    def __str__(self) -> str:
        wanted = f", for {self.aim}" if self.aim else ""
        found = self.densities
        lines = [
            f"{found.overall:.1%} of attention was computed; sparse calls kept "
            f"{found.of_sparse_calls:.1%} of their pairs{wanted}."
        ]
        if self.has_nan:
            lines.append(f"{NAN_IN_SPARSE}.")
        for reason, count in self.reasons.items():
            lines.append(f"{count} calls were dense: {reason.rstrip('.')}.")
        return "\n".join(lines)

    def details(self) -> Iterator[str]:
        """Lines on what was asked for and on what each step and each layer did.

        Densities of steps are 100 % where all calls were dense, - where none came.
        """
        if self.aim is not None:
            yield f"Asked for {self.aim}."
        pool_weight = self.of_heads("pool_weight")
        if heads := pool_weight.numel():
            pooled = 100 * float((pool_weight > 0).float().mean())
            yield f"{pooled:.0f} % of {heads} heads use pooled keys."
        order_kinds = sum((Counter(shape.order_kinds) for shape in self.shapes), Counter())
        if order_kinds:
            taken = (f"{BLOCKS_OF[kind]} in {order_kinds[kind]}" for kind in sorted(order_kinds))
            yield f"Blocks of tokens by head: {', '.join(taken)}."
        if of_steps := self.densities.of_steps.tolist():
            shares = ("-" if math.isnan(share) else f"{100 * share:.0f}" for share in of_steps)
            yield f"Density by step, %: {' '.join(shares)}."
        if line := self.time.line():
            yield line
        for shape in self.shapes:
            yield from shape.lines()
