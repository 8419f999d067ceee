# SPDX-License-Identifier: Apache-2.0
"""Choices of calibration: the settings of the heads of all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..head_settings import OPTIONAL, HeadBudget, Router
from ..policy import SparsePolicy
from .layer_budgets import LayerBudgets
from .loudness import mean_error


@dataclass(frozen=True, eq=False)
class HeadChoices:
    """Head settings, each (layers, heads) on the CPU. Rows of layers that were not measured hold
    density 1.

    density, gain, contrast float32, router, walk int32: as in `HeadBudget`. error float32: expected
    relative L2 error of the attention output. loudness float32: the head weight in means over
    heads; 1 in the mean, 0 in layers that were not measured.
    """

    density: Tensor
    gain: Tensor
    contrast: Tensor
    router: Tensor
    walk: Tensor
    error: Tensor
    loudness: Tensor
    measured: Tensor
    """(layers,) bool: whether the layer was measured."""
    floor: int = 1

    @property
    def layers(self) -> int:
        return self.density.shape[0]

    @property
    def heads(self) -> int:
        return self.density.shape[1]

    @property
    def mean_error(self) -> float:
        """Mean error over heads, each by its weight: what a target is of. NaN where no head
        counts.
        """
        error = mean_error(self.error, self.loudness)
        return math.nan if error is None else error

    def budgets(
        self,
        device: torch.device | str = "cpu",
        policy: SparsePolicy | None = None,
        *,
        before: LayerBudgets | None = None,
    ) -> LayerBudgets:
        """Returns the head settings of each layer, uploaded all at once.

        Layers have one structure: token orders in all of them or, where all heads take the first,
        in none; output scales in all or, where no head has one, in none. What a call allocates
        depends on that structure, and ComfyUI wants it to stay the same from step to step. Not
        every call can have output scales, and torch.compile would trace either kind.

        policy: as in `LayerBudgets`. before: head settings of the step before, whose structure is
        kept.
        """
        names = ("density", "gain", "router", *OPTIONAL)
        uploaded: dict[str, Any] = {
            name: getattr(self, name).to(device, copy=True).flatten() for name in names
        }
        other = before.of_all if before is not None and any(before.measured) else None
        pools = bool(self.gain.any() or (self.router == Router.ERROR).any())
        pools |= other is not None and other.pools
        for name, (_, none) in OPTIONAL.items():
            is_used = bool((getattr(self, name) != none).any())
            if not is_used and (other is None or getattr(other, name) is None):
                uploaded[name] = None
        of_all = HeadBudget(**uploaded, floor=self.floor, pools=pools)
        return LayerBudgets(of_all, self.measured.tolist(), policy)

    def budget(self, layer: int, device: torch.device | str = "cpu") -> HeadBudget | None:
        """Returns the head settings of one layer; None where it was not measured."""
        return self.budgets(device)[layer]
