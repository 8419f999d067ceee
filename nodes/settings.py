# SPDX-License-Identifier: Apache-2.0
"""Widgets of SpargeAttention as one frozen value, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..sparge import SparsePolicy
from .aim import MODES, QUALITIES, Aim, aim_of
from .blocks import BlockSpans


@dataclass(frozen=True)
class Settings:
    """Values of the widgets. Field names and order are the widgets' names and order, which saved
    graphs rely on."""

    mode: str = "manual"
    topk: float = 0.5
    pvthreshd: float = 15.0
    start_percent: float = 0.2
    end_percent: float = 1.0
    min_tokens: int = 4096
    dense_blocks: str = ""
    select_by: str = "topk"
    cdfthreshd: float = 0.98
    simthreshd1: float = -0.1
    quality: str = "balanced"

    def __post_init__(self) -> None:
        """Checks the values when the node runs, not steps later: what comes through a link instead
        of a widget, the server has not looked at. Raises ValueError."""
        for name, options in (("mode", MODES), ("quality", list(QUALITIES))):
            if getattr(self, name) not in options:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it takes one of {options}.")
        for name in ("start_percent", "end_percent"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes a number from 0 to 1.")
        self.policy()
        BlockSpans.parse(self.dense_blocks)

    @cached_property
    def aim(self) -> Aim | None:
        """Aim for measured heads; None in manual mode."""
        return aim_of(self.mode, self.quality, self.topk)

    @cached_property
    def dense_spans(self) -> BlockSpans:
        return BlockSpans.parse(self.dense_blocks)

    def policy(self) -> SparsePolicy:
        """Policy without the text, which calls have in different places."""
        return SparsePolicy(
            # A measured head keeps a share of the blocks, never one of the mass.
            select_by="topk" if self.aim else self.select_by,
            topk=self.topk,
            cdfthreshd=self.cdfthreshd,
            simthreshd1=self.simthreshd1,
            pvthreshd=self.pvthreshd,
        )
