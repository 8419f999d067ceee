# SPDX-License-Identifier: Apache-2.0
"""Counts of one rank's attention calls."""

from __future__ import annotations

import logging
from collections import Counter

from ...call_stats import CallStats

logger = logging.getLogger("sparge")


class RankStats(CallStats):
    """Counts of sparse calls and of what they lack, and of the other calls by reason."""

    def __init__(self) -> None:
        super().__init__()
        self.remarks: Counter[str] = Counter()
        """Sparse calls that lack something, by the remark."""

    def remark(self, what: str) -> None:
        """Counts a sparse call that lacks something; the first one is logged."""
        if not self.remarks[what]:
            logger.warning("Sparge Attention on several GPUs: %s", what)
        self.remarks[what] += 1

    def __str__(self) -> str:
        lines = [f"  {count} x {what}" for what, count in self.remarks.most_common()]
        return "\n".join([super().__str__(), *(["of the sparse calls:", *lines] if lines else [])])
