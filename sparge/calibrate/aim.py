# SPDX-License-Identifier: Apache-2.0
"""What is asked of measured heads: a target error for each, or a mean density over all of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .calibration import Calibration
from .choices import HeadChoices


@dataclass(frozen=True)
class Aim:
    """A target error for every head, or else a mean density over all of them."""

    kind: str
    """As profiles call it: "quality" or "budget"."""
    value: float

    @property
    def target(self) -> float | None:
        return self.value if self.kind == "quality" else None

    @property
    def falls(self) -> bool:
        """Whether early steps may keep more than late ones: a target holds in all of them."""
        return self.kind == "budget"

    def freeze(
        self, calibration: Calibration, steps: int, first: int = 0, drift: Tensor | None = None
    ) -> tuple[HeadChoices, list[HeadChoices]]:
        """The choices over all of so many sparse steps, and those of each from the `first` on where
        they differ. Waits for the GPU. Raises ValueError when nothing was measured.

        drift: as in `Calibration.freeze`."""
        if not self.falls:
            return calibration.freeze(target=self.value, drift=drift), []
        return calibration.freeze_steps(self.value, steps, first=first, drift=drift)

    def __str__(self) -> str:
        if self.kind == "quality":
            return f"a target error of {self.value:g}"
        return f"a mean density of {100 * self.value:g} %"
