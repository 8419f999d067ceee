# SPDX-License-Identifier: Apache-2.0
"""Places of tokens after the all-to-all of an engine that splits one sequence over several GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks.argument import whole_number


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


def _by_rank(parts: Sequence[Tensor], ranks: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.tensor_split(ranks) for part in parts), strict=True))
