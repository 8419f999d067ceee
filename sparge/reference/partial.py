# SPDX-License-Identifier: Apache-2.0
"""Softmax attention over some of the keys, kept open so that parts can be put together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_LOGIT = -torch.inf


@dataclass(frozen=True, eq=False)
class Partial:
    """Sums of exp2(s - row_max) over the keys of a part, in float32.

    unnormalised (..., R, D): of exp2(s - m) v. row_max (..., R): m, the reference logit in log2
    units, -inf where a row has met no key. row_sum (..., R): of exp2(s - m).
    """

    unnormalised: Tensor
    row_max: Tensor
    row_sum: Tensor

    def plus(self, other: Partial) -> Partial:
        """Both parts, over disjoint keys, put together."""
        top = torch.maximum(self.row_max, other.row_max)
        mine, others = _shrink(self.row_max, top), _shrink(other.row_max, top)
        return Partial(
            self.unnormalised * mine.unsqueeze(-1) + other.unnormalised * others.unsqueeze(-1),
            top,
            self.row_sum * mine + other.row_sum * others,
        )

    def output(self) -> Tensor:
        """(..., R, D): the attention output, 0 for rows that no key of any weight reached."""
        inverse = torch.where(self.row_sum == 0, 0, 1 / self.row_sum)
        return self.unnormalised * inverse.unsqueeze(-1)


def finite(maximum: Tensor) -> Tensor:
    """Maximum that is safe to subtract: rows without any logit yet have 0 rather than -inf, which
    would give NaN."""
    return maximum.masked_fill(maximum == NO_LOGIT, 0)


def _shrink(row_max: Tensor, top: Tensor) -> Tensor:
    return torch.exp2(row_max - finite(top))
