# SPDX-License-Identifier: Apache-2.0
"""What calibration decided for the heads of all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.budget import HeadBudget, Router


@dataclass(frozen=True, eq=False)
class HeadChoices:
    """All (layers, heads), on the CPU; rows of layers that were not measured hold density 1.

    density, gain float32, router, walk int32: as in `HeadBudget`. error float32: the relative L2
    error of the attention output that these are expected to make.
    """

    density: Tensor
    gain: Tensor
    router: Tensor
    walk: Tensor
    error: Tensor
    measured: Tensor
    """(layers,) bool."""
    floor: int = 1

    @property
    def layers(self) -> int:
        return self.density.shape[0]

    @property
    def heads(self) -> int:
        return self.density.shape[1]

    def budget(self, layer: int, device: torch.device | str = "cpu") -> HeadBudget | None:
        """What `layer` may keep, values of its own; None where it was not measured, so that it has
        to stay dense. Its walks are None where all heads take the first."""
        if not self.measured[layer]:
            return None
        walk = self.walk[layer]
        return HeadBudget(
            self.density[layer].to(device, copy=True),
            self.gain[layer].to(device, copy=True),
            self.router[layer].to(device, copy=True),
            self.floor,
            pools=bool(self.gain[layer].any() or (self.router[layer] == Router.ERROR).any()),
            walk=walk.to(device, copy=True) if walk.any() else None,
        )
