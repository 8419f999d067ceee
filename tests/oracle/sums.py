# SPDX-License-Identifier: Apache-2.0
"""Sums of softmax attention over some of the keys, kept open so that parts can be put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .arithmetic import Arithmetic, OnlineSoftmax, finite


@dataclass(frozen=True, eq=False)
class Partial:
    """Sums of exp2(s - row_max) over the keys of a part, in float32.

    unnormalised (..., R, D): of exp2(s - m) v. row_max (..., R): m, the reference logit in log2
    units, -inf where a row has met no key. row_sum (..., R): of exp2(s - m).
    """

    unnormalised: Tensor
    row_max: Tensor
    row_sum: Tensor

    @classmethod
    def of_no_key(cls, rows: int, channels: int, device: torch.device) -> Partial:
        row_sum = torch.zeros(rows, device=device)
        return cls(row_sum.new_zeros(rows, channels), torch.full_like(row_sum, -torch.inf), row_sum)

    @classmethod
    def joined(cls, join: Callable[[list[Tensor]], Tensor], parts: list[Partial]) -> Partial:
        """Parts of other rows."""
        names = [field.name for field in fields(cls)]
        return cls(*(join([getattr(part, name) for part in parts]) for name in names))

    def plus(self, other: Partial) -> Partial:
        """Both parts, over disjoint keys, put together."""
        top = torch.maximum(self.row_max, other.row_max)
        mine, others = (torch.exp2(part.row_max - finite(top)) for part in (self, other))
        return Partial(
            self.unnormalised * mine.unsqueeze(-1) + other.unnormalised * others.unsqueeze(-1),
            top,
            self.row_sum * mine + other.row_sum * others,
        )

    def output(self) -> Tensor:
        """(..., R, D): the attention output, 0 for rows that no key of any weight reached."""
        inverse = torch.where(self.row_sum == 0, 0, 1 / self.row_sum)
        return self.unnormalised * inverse.unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class Values:
    """Values of one KV head's keys or pseudo-keys, to be summed by their weights."""

    scale: Tensor  # (D,)
    mean: Tensor  # (D,)
    arithmetic: Arithmetic
    softmax: OnlineSoftmax

    def sums(
        self,
        exponents: Tensor,
        maxima: Tensor,
        levels: Tensor,
        lost: Tensor | None = None,
        worth: Tensor | None = None,
    ) -> Partial:
        """Sums over the keys of all steps.

        exponents: (R, steps, keys of a step), logits less `maxima` (R, steps), the running ones.
        levels: (steps * keys, D) of the values. lost: (R,) bool, rows whose softmax is no number.
        worth: (steps, keys) as in `OnlineSoftmax.weigh`.
        """
        rescale = torch.exp2(maxima - finite(maxima[:, -1:])).unsqueeze(-1)
        stored, sums = self.softmax.weigh(exponents, self.arithmetic, worth)
        row_sum = (sums * rescale).sum((-2, -1))
        if lost is not None:
            row_sum = row_sum.masked_fill(lost, torch.nan)
        acc = stored.mul_(rescale).flatten(1) @ levels / self.arithmetic.p_peak
        unnormalised = acc * self.scale + row_sum.unsqueeze(-1) * self.mean
        return Partial(unnormalised, maxima[:, -1], row_sum)
