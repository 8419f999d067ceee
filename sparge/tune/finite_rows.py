# SPDX-License-Identifier: Apache-2.0
"""Layers in whose results NaN or inf stood, so that their user hears of it."""

from __future__ import annotations

import torch
from torch import Tensor

OF_MODEL = "the model gave {what} here, without Sparge Attention's doing"


class FiniteRows:
    """Rows of calls whose results were looked at, on their device."""

    def __init__(self) -> None:
        self._found: dict[int, Tensor] = {}  # (2,) bool: whether NaN, and inf, came

    def __bool__(self) -> bool:
        return bool(self._found)

    def look(self, row: int, out: Tensor) -> None:
        """Looks for NaN and inf in a result. Never waits, but allocates what outlives the call."""
        extremes = torch.stack(torch.aminmax(out))
        found = torch.stack([extremes.isnan().any(), extremes.isinf().any()])
        self._found[row] = found | self._found[row] if row in self._found else found

    def not_finite(self) -> dict[int, str]:
        """Rows with something else than finite numbers: "NaN", or "inf" alone. Waits for the
        GPU."""
        if not self._found:
            return {}
        found = zip(self._found, torch.stack([*self._found.values()]).tolist(), strict=True)
        return {row: "NaN" if nan else "inf" for row, (nan, inf) in found if nan or inf}
