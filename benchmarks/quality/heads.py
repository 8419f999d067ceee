# SPDX-License-Identifier: Apache-2.0
"""Errors of the heads of sampled clips, beside what was expected and what plain drop makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from benchmarks.quality.study import DROP_NOISE, PREDICTED_WITHIN

Shares = dict[str, float]


@dataclass(frozen=True, eq=False)
class JudgedHeads:
    """Relative L2 errors (clips, steps, layers, heads) float64."""

    found: Tensor
    expected: Tensor
    """Errors that the choices expect."""
    dropped: Tensor
    """Errors of upstream's drop of the same tensors, at each head's own density."""
    loudness: Tensor
    """Head weights: no error, but what each counts in a mean."""

    @classmethod
    def of_clips(cls, runs: Sequence[JudgedHeads]) -> JudgedHeads:
        names = [part.name for part in fields(cls)]
        return cls(*(torch.cat([getattr(run, name) for run in runs]) for name in names))

    def shares(self) -> Shares:
        """Shares that sum the errors up.

        Of single calls and of heads (their means over the steps of a clip): those whose errors are
        as expected, within PREDICTED_WITHIN. Of heads: those no worse than drop by more than noise,
        and how the worst one compares with drop, in one clip and in the mean of all. The mean error
        by head weight, which is what targets are of, of all clips and of the worst.
        """
        found, expected, dropped = (x.mean(1) for x in (self.found, self.expected, self.dropped))
        to_drop = found / dropped
        of_clips = (self.found * self.loudness).sum((1, 2, 3)) / self.loudness.sum((1, 2, 3))
        return {
            "calls_within": _near(self.found / self.expected),
            "heads_within": _near(found / expected),
            "no_worse_than_drop": _share(to_drop <= DROP_NOISE),
            "worst_to_drop": float(to_drop.max()),
            "worst_to_drop_of_clips": float((found.mean(0) / dropped.mean(0)).max()),
            "mean_error": float(of_clips.mean()),
            "worst_mean_error": float(of_clips.max()),
        }


def _near(ratios: Tensor) -> float:
    return _share((ratios < PREDICTED_WITHIN) & (ratios > 1 / PREDICTED_WITHIN))


def _share(which: Tensor) -> float:
    return float(which.double().mean())
