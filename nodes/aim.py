# SPDX-License-Identifier: Apache-2.0
"""What the modes ask of measured heads. Option texts are in saved graphs: only append."""

from __future__ import annotations

from ..sparge.calibrate import Aim

MANUAL = "manual"
AUTO_QUALITY = "auto quality"
AUTO_BUDGET = "auto budget"
MODES = [MANUAL, AUTO_QUALITY, AUTO_BUDGET]

#: Mean relative L2 error of the heads' outputs, louder heads counting more (as in `HeadChoices`).
#: For scale: on four small video DiTs .06 takes a density of .30 to .44 and brings clips to 36 to
#: 40 dB of PSNR, .03 takes .45 to .59 for 42 to 44 dB; 8-bit arithmetic alone makes .002 to .031.
QUALITIES = {"high": 0.03, "balanced": 0.06, "fast": 0.10}


def aim_of(mode: str, quality: str, topk: float) -> Aim | None:
    """None in manual mode, which measures nothing."""
    if mode == AUTO_QUALITY:
        return Aim("quality", QUALITIES[quality])
    return Aim("budget", topk) if mode == AUTO_BUDGET else None
