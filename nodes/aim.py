# SPDX-License-Identifier: Apache-2.0
"""Aims of the modes for measured heads. Option texts are in saved graphs: only append."""

from __future__ import annotations

from ..sparge.tune import Aim

MANUAL = "manual"
AUTO_QUALITY = "auto quality"
AUTO_BUDGET = "auto budget"
MODES = [MANUAL, AUTO_QUALITY, AUTO_BUDGET]

#: Target errors: mean relative L2 error of the heads' outputs, each by its head weight
#: (`HeadChoices.head_weight`; docs/experiments.md, Targets of the qualities).
QUALITIES = {"high": 0.03, "balanced": 0.06, "fast": 0.10}


def aim_of(mode: str, quality: str, topk: float) -> Aim | None:
    """Returns the aim of a mode; None in manual mode, which measures nothing."""
    if mode == AUTO_QUALITY:
        return Aim("quality", QUALITIES[quality])
    return Aim("budget", topk) if mode == AUTO_BUDGET else None
