# SPDX-License-Identifier: Apache-2.0
"""Drift: how much the errors of heads have grown since they were measured, and will grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Share of the way that errors went between two choices which they are expected to go on
#: (docs/experiments.md, Trend).
TREND = 0.25
#: Share of the drift found in the token order that a head takes which its other orders are taken to
#: have, in logarithms (docs/experiments.md, Drift in other orders).
SHARED = 0.5


@dataclass(frozen=True, eq=False)
class Seen:
    """Steps and token orders that the drift of each head was found in."""

    walks: Tensor
    """(layers, steps, heads): token orders that the heads took since the last choice."""
    visited: Tensor
    """(layers, steps) bool: the steps that were probed."""
    middle: Tensor
    """(layers,): mean of the probed steps, counted from the last choice."""

    def taken(self, walks: Tensor) -> Tensor:
        """(layers, heads, orders) bool: which of these each head took in those steps."""
        took = self.walks.unsqueeze(-1) == walks
        return (took & self.visited[:, :, None, None]).any(1)


class Drift:
    """Growth of errors since one measurement of the token orders `walks`."""

    def __init__(self, walks: Sequence[int]) -> None:
        self._walks = torch.tensor(walks, device="cpu")
        self.grown: Tensor | None = None
        """(layers, heads, orders) float64: growth as found last, or guessed from another token
        order."""
        self.ahead: Tensor | None = None
        """(layers, heads, orders) float64: growth expected until the next choice; None before
        anything was found."""

    def find(self, times: Tensor, seen: Seen, steps: int) -> None:
        """Takes note of errors that were seen.

        times: (layers, heads) float64, errors seen over errors expected. steps: from the last
        choice to this one, and to the next.
        """
        taken, middle = seen.taken(self._walks), seen.middle.double()[:, None, None]
        grown, ahead = self.grown, self.ahead
        since = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
        if grown is None or ahead is None:
            grown = ahead = torch.ones(taken.shape, dtype=torch.float64, device="cpu")
            since = middle + 1  # the step before the first one was measured
        to_come = steps + (steps - 1) / 2 - middle  # to the middle of the next ones
        found = times.double().unsqueeze(-1) * _of_taken(ahead, taken)
        way = found / _of_taken(grown, taken)
        share = torch.where(taken, 1.0, SHARED)
        self.grown = grown * way**share
        self.ahead = self.grown * way ** (share * TREND * to_come / since)


def _of_taken(values: Tensor, taken: Tensor) -> Tensor:
    """(layers, heads, 1): mean over the token orders that each head takes."""
    return (values * taken).sum(-1, keepdim=True) / taken.sum(-1, keepdim=True)
