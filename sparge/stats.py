# SPDX-License-Identifier: Apache-2.0
"""Counters that kernels add to; nothing waits for the GPU until somebody reads them."""

from __future__ import annotations

import torch
from torch import Tensor


class AttentionStats:
    """Kept, valid and PV-skipped query-key pairs, over all calls that were given this object.

    ``counters`` is an int64 tensor ``[kept, valid, skipped]`` on ``device``. Make it once, outside
    the attention calls; reading a property synchronises with the device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.counters: Tensor = torch.zeros(3, dtype=torch.int64, device=device)
        self.calls = 0

    def reset(self) -> None:
        self.counters.zero_()
        self.calls = 0

    @property
    def density(self) -> float:
        """Kept pairs over valid pairs, forced blocks included; 1.0 before any call."""
        kept, valid, _ = self.counters.tolist()
        return kept / valid if valid else 1.0

    @property
    def pv_skipped_share(self) -> float:
        """Share of the kept pairs whose exp and PV the filter skipped."""
        kept, _, skipped = self.counters.tolist()
        return skipped / kept if kept else 0.0
