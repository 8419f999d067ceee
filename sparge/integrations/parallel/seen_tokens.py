# SPDX-License-Identifier: Apache-2.0
"""Tokens as a rank sees them after the all-to-all, and what of them is kept exact."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ...order.grid import TokenGrid, TokenOrder, grid_order
from ...policy import SparsePolicy

#: Remark on sparse calls whose text is as sparse as the picture.
TEXT_UNPROTECTED = (
    "text was not kept exact: nobody says where it stands after the all-to-all (give places, as "
    "dealt_places makes them)"
)


@dataclass(frozen=True, eq=False)
class SeenTokens:
    """Policy and token order of the calls that a rank makes."""

    policy: SparsePolicy
    order: TokenOrder | None = None
    """Order of the tokens as they stand there; None where they are taken as they come."""
    remark: str = ""
    """What the calls lack."""

    @classmethod
    def of(cls, policy: SparsePolicy, grid: TokenGrid | None, places: Tensor | None) -> SeenTokens:
        """grid: of the whole sequence. places: (tokens,) int, the token of the whole sequence at
        each place; None where the engine says nothing."""
        if places is not None:
            grid = grid or _line(policy, places.numel())
            return cls(policy, grid_order(grid).taken_from(places))
        has_text = (
            grid.prefix or grid.suffix if grid else policy.exact_prefix or policy.exact_suffix
        )
        if has_text:
            return cls(replace(policy, exact_prefix=0, exact_suffix=0), remark=TEXT_UNPROTECTED)
        return cls(policy, None if grid is None else grid_order(grid))

    def misfit(self, queries: int, keys: int) -> str:
        """Reason why a call is not one of these tokens; empty where it may be."""
        if self.order is None or queries == keys == self.order.tokens:
            return ""
        return f"{queries} queries and {keys} keys, and not the {self.order.tokens} of the grid"


def _line(policy: SparsePolicy, tokens: int) -> TokenGrid:
    """Grid of tokens in a line, with the policy's exact ends beside it."""
    before = min(policy.exact_prefix, tokens - 1)
    after = min(policy.exact_suffix, tokens - 1 - before)
    return TokenGrid(1, 1, tokens - before - after, prefix=before, suffix=after)
