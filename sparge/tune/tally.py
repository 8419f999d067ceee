# SPDX-License-Identifier: Apache-2.0
"""Counts of a run while it goes on: nothing of the model."""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts of calls; several threads add to it when ComfyUI splits a run over GPUs."""

    sparse: int = 0
    cross: int = 0
    eight_bit: int = 0
    """Dense calls by 8-bit dense attention."""
    forwards: int = 0
    tokens: int = 0
    family: str = ""
    filter_left_out: bool = False
    """Whether some sparse call ran without the PV filter that was asked for."""
    finished: int = 0
    """Forward passes that came to their end."""
    may_have_been_sparse: bool = False
    """Whether one of them may have been sparse, or nothing may in the whole run."""
    grid_tokens: int = 0
    """Most tokens that a clip had in a pass; 0 where that was never known."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons of dense self-attention calls."""
    reached: bool = False
    """Whether a call of the clip's self-attention came, or no clip is known."""
    _grid: tuple[int, int, int] | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def dense(self) -> int:
        return self.reasons.total()

    @property
    def calls(self) -> int:
        return self.sparse + self.dense + self.cross

    @property
    def missing(self) -> str:
        """Word for what never attended to itself, "clip" or "picture"; empty where it did."""
        if self._grid is None or self.reached or not self.finished or self.calls == 0:
            return ""
        return "clip" if self._grid[0] > 1 else "picture"

    def add_forward(self, family: str, grid: tuple[int, int, int] | None) -> None:
        """Counts a forward pass. grid: tokens of the clip along (time, height, width)."""
        with self._lock:
            self.forwards += 1
            self.family = family
            self._grid, self.reached = grid, self.reached or grid is None
            self.grid_tokens = max(self.grid_tokens, math.prod(grid) if grid else 0)

    def end_forward(self, may_be_sparse: bool) -> None:
        with self._lock:
            self.finished += 1
            self.may_have_been_sparse |= may_be_sparse

    def add_sparse(self, tokens: int, filter_left_out: bool) -> None:
        with self._lock:
            self.sparse += 1
            self.filter_left_out |= filter_left_out
            self.tokens = max(self.tokens, tokens)

    def add_dense(self, reason: str, tokens: int, by_eight_bit: bool) -> None:
        with self._lock:
            self.reasons[reason] += 1
            self.eight_bit += by_eight_bit
            self.tokens = max(self.tokens, tokens)

    def add_cross(self) -> None:
        with self._lock:
            self.cross += 1
