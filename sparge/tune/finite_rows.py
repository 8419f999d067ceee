# SPDX-License-Identifier: Apache-2.0
"""Layers in whose dense results NaN or inf stood, so that their user knows whose fault it is."""

from __future__ import annotations

import torch
from torch import Tensor

NAN_OF_MODEL = "the model gave NaN here, without Sparge Attention's doing"
INF_OF_MODEL = "the model gave inf here, without Sparge Attention's doing"


class FiniteRows:
    """Rows of dense calls that were looked at, on their device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._finite = torch.ones(2, rows, dtype=torch.bool, device=device)
        """Rows without NaN, and those without inf."""

    def look(self, row: int, dense: Tensor) -> None:
        """Looks for NaN and inf in a dense result. Never waits."""
        extremes = torch.stack(torch.aminmax(dense))
        self._finite[0, row] &= ~extremes.isnan().any()
        self._finite[1, row] &= ~extremes.isinf().any()

    def reasons(self) -> dict[int, str]:
        """Reason of each row that was not finite. Waits for the GPU."""
        no_nan, no_inf = self._finite.tolist()
        return {
            row: INF_OF_MODEL if no_nan[row] else NAN_OF_MODEL
            for row in range(len(no_nan))
            if not (no_nan[row] and no_inf[row])
        }
