# SPDX-License-Identifier: Apache-2.0
"""Report of a session, in numbers on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .aim import Aim
from .head_table import HeadTable
from .measured_shape import MeasuredShape
from .records import Densities


@dataclass(frozen=True, eq=False)
class Report:
    """Densities, errors and reasons of one run."""

    aim: Aim | None
    densities: Densities
    shapes: tuple[MeasuredShape, ...]
    """Measured heads, one entry for each shape of calls."""
    reasons: Mapping[str, int]
    """Number of exact calls by the reason why they were not sparse, the most frequent first."""

    @classmethod
    def of(
        cls,
        aim: Aim | None,
        densities: Densities,
        tables: Sequence[HeadTable],
        reasons: Counter[str],
    ) -> Report:
        shapes = tuple(MeasuredShape.of(table) for table in tables)
        return cls(aim, densities, shapes, dict(reasons.most_common()))

    def __str__(self) -> str:
        wanted = f", for {self.aim}" if self.aim else ""
        lines = [f"Sparse calls kept {self.densities.overall:.1%} of their pairs{wanted}."]
        for reason, count in self.reasons.items():
            lines.append(f"{count} calls were exact: {reason.rstrip('.')}.")
        return "\n".join(lines)
