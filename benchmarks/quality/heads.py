# SPDX-License-Identifier: Apache-2.0
"""Errors of the heads of sampled clips, beside what was expected and what plain drop makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

PREDICTED_WITHIN = 1.5  # the factor between expected and reached error that the product promises
DROP_NOISE = 1.1  # two samples of query blocks rank a head's candidates this well


@dataclass(frozen=True, eq=False)
class JudgedHeads:
    """Relative L2 errors (clips, steps, layers, heads) float64."""

    found: Tensor
    expected: Tensor
    """Errors that the settings expect."""
    dropped: Tensor
    """Errors of upstream's drop of the same tensors, at each head's own density."""
    head_weight: Tensor
    """Head weights: no error, but what each counts in a mean."""

    @classmethod
    def of_clips(cls, runs: Sequence[JudgedHeads]) -> JudgedHeads:
        names = [part.name for part in fields(cls)]
        return cls(*(torch.cat([getattr(run, name) for run in runs]) for name in names))

    def shares(self) -> dict[str, float]:
        """Shares of the heads (their means over the steps of a clip) whose error is as expected,
        within PREDICTED_WITHIN, and of those no worse than drop by more than noise; and the mean
        error by head weight, which is what targets are of, of all clips and of the worst."""
        found, expected, dropped = (x.mean(1) for x in (self.found, self.expected, self.dropped))
        ratios = found / expected
        near = (ratios < PREDICTED_WITHIN) & (ratios > 1 / PREDICTED_WITHIN)
        of_clips = (self.found * self.head_weight).sum((1, 2, 3)) / self.head_weight.sum((1, 2, 3))
        return {
            "heads_within": float(near.double().mean()),
            "no_worse_than_drop": float((found <= DROP_NOISE * dropped).double().mean()),
            "mean_error": float(of_clips.mean()),
            "worst_mean_error": float(of_clips.max()),
        }
