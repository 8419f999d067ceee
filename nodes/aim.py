# SPDX-License-Identifier: Apache-2.0
"""What the modes ask of measured heads. Option texts are in saved graphs: only append."""

from __future__ import annotations

from ..sparge.calibrate import Aim

MANUAL = "manual"
AUTO_QUALITY = "auto quality"
AUTO_BUDGET = "auto budget"
MODES = [MANUAL, AUTO_QUALITY, AUTO_BUDGET]

#: Relative L2 error that the output of each head may have. For scale: on video through DINOv2 a
#: mean density of 30, 20 and 10 % gives about .02, .04 and .07; dropping blocks unmeasured .16 and
#: more; 8-bit arithmetic alone .004.
QUALITIES = {"high": 0.03, "balanced": 0.06, "fast": 0.10}


def aim_of(mode: str, quality: str, topk: float) -> Aim | None:
    """None in manual mode, which measures nothing."""
    if mode == AUTO_QUALITY:
        return Aim("quality", QUALITIES[quality])
    return Aim("budget", topk) if mode == AUTO_BUDGET else None
