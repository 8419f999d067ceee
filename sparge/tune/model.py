# SPDX-License-Identifier: Apache-2.0
"""A model as a simple sampling loop knows it."""

from __future__ import annotations

from dataclasses import dataclass

from ..order.grid import TokenGrid


@dataclass(frozen=True)
class Model:
    """Self-attention layers and tokens of a model. It is a `Layout`."""

    layers: int
    """Number of self-attention layers; calls are numbered from 0."""
    grid: TokenGrid | None = None
    """Grid of the clip's tokens, with text before and after it; None where they have none."""
    heads: int | None = None
    """Attention heads of a layer; with them all that a step needs is made as it begins."""
    ranks: int = 1
    """Number of processes that share the tokens outside of attention (Ulysses): `heads` are then
    those of this one."""

    @property
    def rows(self) -> int:
        return self.layers

    @property
    def blocks(self) -> int:
        return self.layers

    @property
    def expected(self) -> tuple[TokenGrid, ...]:
        return () if self.grid is None else (self.grid,)

    def sequence(self, tokens: int) -> TokenGrid | None:
        """The grid, for calls over all of its tokens."""
        return self.grid if self.grid is not None and self.grid.tokens == tokens else None
