# SPDX-License-Identifier: Apache-2.0
"""What the modes ask of measured heads. Option texts are in saved graphs: only append."""

from __future__ import annotations

from dataclasses import dataclass

from ..sparge.calibrate import Calibration, HeadChoices

MANUAL = "manual"
AUTO_QUALITY = "auto quality"
AUTO_BUDGET = "auto budget"
MODES = [MANUAL, AUTO_QUALITY, AUTO_BUDGET]

#: Relative L2 error that the output of each head may have. For scale: on video through DINOv2 a
#: mean density of 30, 20 and 10 % gives about .02, .04 and .07; dropping blocks unmeasured .16 and
#: more; 8-bit arithmetic alone .004.
QUALITIES = {"high": 0.03, "balanced": 0.06, "fast": 0.10}


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

    def freeze(self, calibration: Calibration, steps: int) -> tuple[HeadChoices, list[HeadChoices]]:
        """The choices over all of so many sparse steps, and those of each where they differ. Waits
        for the GPU. Raises ValueError when nothing was measured."""
        if not self.falls:
            return calibration.freeze(target=self.value), []
        return calibration.freeze_steps(self.value, steps)

    def __str__(self) -> str:
        if self.kind == "quality":
            return f"a target error of {self.value:g}"
        return f"a mean density of {100 * self.value:g} %"


def aim_of(mode: str, quality: str, topk: float) -> Aim | None:
    """None in manual mode, which measures nothing."""
    if mode == AUTO_QUALITY:
        return Aim("quality", QUALITIES[quality])
    return Aim("budget", topk) if mode == AUTO_BUDGET else None
