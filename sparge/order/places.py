# SPDX-License-Identifier: Apache-2.0
"""Places of tokens after the all-to-all of an engine that splits one sequence over several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..checks.argument import whole_number
from .grid import TokenGrid, TokenOrder
from .variants import VARIANTS


def dealt_places(parts: Sequence[int], ranks: int) -> Tensor:
    """(tokens,) int64: the token of the whole sequence that stands at each place of what a rank
    sees, where an engine deals each part by itself: text 0, picture 0, text 1, picture 1, ...

    parts: numbers of tokens of the parts of the sequence in their order, such as (512, 4096) for
        text and picture; an engine that deals the sequence as one has one.
    ranks: number of ranks that share the sequence. Where it does not divide a part, the first ones
        get a token more, as `torch.tensor_split` has it.
    """
    ranks = whole_number("ranks", ranks, 1)
    sizes = [whole_number("a part", part, 0) for part in parts]
    tokens = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([share for of_rank in _by_rank(tokens, ranks) for share in of_rank])


def parts_of(grid: TokenGrid) -> tuple[int, int, int]:
    """Numbers of tokens of the parts that diffusers deals each by itself: text before the grid, the
    grid with its tail, text after it."""
    return grid.prefix, grid.tokens - grid.prefix - grid.suffix, grid.suffix


def order_as_dealt(order: TokenOrder, grid: TokenGrid, ranks: int) -> TokenOrder:
    """Order of a grid as ranks see its tokens; of one rank, the order itself."""
    return order if ranks == 1 else _as_dealt(order, grid, ranks)


@lru_cache(maxsize=8 * VARIANTS)  # the very object each time, which copies on devices are made of
def _as_dealt(order: TokenOrder, grid: TokenGrid, ranks: int) -> TokenOrder:
    return order.taken_from(dealt_places(parts_of(grid), ranks))


def _by_rank(parts: Sequence[Tensor], ranks: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.tensor_split(ranks) for part in parts), strict=True))
