# SPDX-License-Identifier: Apache-2.0
"""Goal of a run with measured heads: a mean error, or a mean density over all heads and steps."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks.argument import number, shown


@dataclass(frozen=True)
class Aim:
    """Target for the mean error of the heads in each sparse step, or else a mean density over all
    heads and steps."""

    kind: str
    """Name of the aim: "quality" or "budget"."""
    value: float

    def __post_init__(self) -> None:
        if self.kind not in ("quality", "budget"):
            raise ValueError(f'kind is {shown(self.kind)}; an aim is "quality" or "budget".')
        if not 0 <= number("value", self.value) <= 1:  # NaN is not either
            raise ValueError(f"value is {self.value}; an error or a density is from 0 to 1.")

    @property
    def target(self) -> float | None:
        return self.value if self.kind == "quality" else None

    @property
    def falls(self) -> bool:
        """Whether early steps may keep more than late ones. A target holds in each step, so it does
        not fall."""
        return self.kind == "budget"

    def __str__(self) -> str:
        if self.kind == "quality":
            return f"a mean error of {self.value:g}"
        return f"a mean density of {100 * self.value:g} %"
