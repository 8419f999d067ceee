# SPDX-License-Identifier: Apache-2.0
"""How much the errors of heads have grown since they were measured, and are expected to grow on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: How much of the way that errors went between two choices they are expected to go on: on the small
#: DiT most rise or fall all the run long. Within a factor of 1.5 are then 93 % of its heads, 92 %
#: without; half of the way follows the noise.
TREND = 0.25
#: How much of what is found in the walk that a head takes, in logarithms, the other walks are taken
#: to share. With all of it a head whose walk no longer suits it never leaves that before it is
#: measured again: at a target of .1 one of the small DiT erred 1.4 times as much as by plain drop,
#: with half of it none more than 1.05 times (clips 0-7, H200, four choices a run). Clips are as
#: near to dense ones; with nothing up to .4 dB further off.
SHARED = 0.5


@dataclass(frozen=True, eq=False)
class Seen:
    """What the drift of each head was found in."""

    walks: Tensor
    """(layers, steps, heads): those that the heads took since the last choice."""
    visited: Tensor
    """(layers, steps) bool: the steps that were looked at."""
    middle: Tensor
    """(layers,): of those, counted from the last choice."""

    def taken(self, walks: Tensor) -> Tensor:
        """(layers, heads, walks) bool: which of these each head took there."""
        took = self.walks.unsqueeze(-1) == walks
        return (took & self.visited[:, :, None, None]).any(1)


class Drift:
    """Since one measurement of walks `walks`."""

    def __init__(self, walks: Sequence[int]) -> None:
        self._walks = torch.tensor(walks, device="cpu")
        self.grown: Tensor | None = None
        """(layers, heads, walks) float64: as found last, or guessed from another walk."""
        self.ahead: Tensor | None = None
        """The same as expected until the next choice; None before anything was found."""

    def find(self, times: Tensor, seen: Seen, steps: int) -> None:
        """times: (layers, heads) float64, how many times as large as expected the errors that were
        seen are. steps: from the last choice to this one, and to the next."""
        taken, middle = seen.taken(self._walks), seen.middle.double()[:, None, None]
        grown, ahead = self.grown, self.ahead
        since = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
        if grown is None or ahead is None:
            grown = ahead = torch.ones(taken.shape, dtype=torch.float64, device="cpu")
            since = middle + 1  # the step before the first was measured
        to_come = steps + (steps - 1) / 2 - middle  # to the middle of the next ones
        found = times.double().unsqueeze(-1) * _of_taken(ahead, taken)
        way = found / _of_taken(grown, taken)
        share = torch.where(taken, 1.0, SHARED)
        self.grown = grown * way**share
        self.ahead = self.grown * way ** (share * TREND * to_come / since)


def _of_taken(values: Tensor, taken: Tensor) -> Tensor:
    """(layers, heads, 1): of the walks that each head takes, their mean."""
    return (values * taken).sum(-1, keepdim=True) / taken.sum(-1, keepdim=True)
