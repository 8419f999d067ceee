# SPDX-License-Identifier: Apache-2.0
"""How much the errors of heads have grown since they were measured, and are expected to grow on."""

from __future__ import annotations

from collections.abc import Sequence

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


class Drift:
    """Since one measurement of walks `walks`."""

    def __init__(self, walks: Sequence[int]) -> None:
        self._walks = torch.tensor(walks)
        self.grown: Tensor | None = None
        """(layers, heads, walks) float64: as found last, or guessed from another walk."""
        self.ahead: Tensor | None = None
        """The same as expected until the next choice; None before anything was found."""

    def find(self, times: Tensor, walks: Sequence[Tensor], steps: int) -> None:
        """times: (layers, heads) float64, how many times as large as expected the errors were in
        the steps since the last choice, so many. walks: (layers, heads) each, those of the steps
        that were looked at, which stand for the others: steps of either kind, and those of a
        falling mean, may differ.
        """
        taken = torch.stack([walk.unsqueeze(-1) == self._walks for walk in walks]).any(0)
        grown, ahead, part = self.grown, self.ahead, TREND
        if grown is None or ahead is None:
            grown = ahead = torch.ones(taken.shape, dtype=torch.float64)
            # Samples are of the middle of their steps; these go on from the last dense step.
            part *= 2 * steps / (steps + 1)
        found = times.double().unsqueeze(-1) * _of_taken(ahead, taken)
        way = found / _of_taken(grown, taken)
        share = torch.where(taken, 1.0, SHARED)
        self.grown = grown * way**share
        self.ahead = self.grown * way ** (share * part)


def _of_taken(values: Tensor, taken: Tensor) -> Tensor:
    """(layers, heads, 1): of the walks that each head takes, their mean."""
    return (values * taken).sum(-1, keepdim=True) / taken.sum(-1, keepdim=True)
