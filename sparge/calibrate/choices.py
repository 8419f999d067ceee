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

    def budgets(self, device: torch.device | str = "cpu") -> list[HeadBudget | None]:
        """What each layer may keep, values of its own, all uploaded at once; None where it was not
        measured, so that it has to stay dense.

        Layers are of one structure, with walks in all of them or, where all heads take the first,
        in none: what a call allocates depends on it, and ComfyUI wants that to stay the same from
        step to step.
        """
        uploaded = (self.density, self.gain, self.router, self.walk)
        density, gain, router, walk = (values.to(device, copy=True) for values in uploaded)
        pools = bool(self.gain.any() or (self.router == Router.ERROR).any())
        walks = bool(self.walk.any())
        return [
            HeadBudget(
                density[layer],
                gain[layer],
                router[layer],
                self.floor,
                pools=pools,
                walk=walk[layer] if walks else None,
            )
            if self.measured[layer]
            else None
            for layer in range(self.layers)
        ]

    def budget(self, layer: int, device: torch.device | str = "cpu") -> HeadBudget | None:
        """Of one layer."""
        return self.budgets(device)[layer]
