# SPDX-License-Identifier: Apache-2.0
"""What the relative error of a head counts beside those of others.

The outputs of all heads go through one projection and are added to what the layers before have
left, so a loud head's error moves the model more than a quiet one's of the same relative size. In a
layer heads count by the norm of their output. Layers count by the root of theirs: each adds to a
sum that grows from layer to layer, and has its own gate. Clips of three small DiTs at 10, 20 and
30 % density (as in `alternating.py`, the residual in every second step, the others plainly, no
contrast; in dB) with layers counting by

    the root of their norm    30.1 33.8 37.1   27.8 31.8 35.2   28.1 31.8 35.1
    their norm                30.0 33.7 36.9   27.8 31.3 34.3   28.5 32.1 35.7

With the residual in one step of three, at 10 and 20 %: all heads alike 30.1 32.8, 27.9 31.5, 28.1
31.2; by their norm 30.0 33.3, 28.2 31.5, 28.9 32.6.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

LEAST = 1e-6  # an infinite error stays one, whatever its head counts


def loudness(norms: Array) -> Array:
    """(layers, heads), mean 1, from the norms of the heads' outputs, in any unit."""
    of_layers = np.sqrt(norms.mean(1, keepdims=True))
    counts = np.divide(norms, of_layers, out=np.zeros_like(norms), where=of_layers > 0)
    mean = counts.mean()
    return np.maximum(counts / mean, LEAST) if mean > 0 else np.ones_like(norms)


def mean_error(errors: Tensor, loudness: Tensor) -> float | None:
    """Over the heads whose error is known, no NaN, each counted by its loudness: what a target is
    of. None where no such head counts."""
    known = ~errors.isnan()
    counts = loudness[known].double()
    total = float(counts.sum())
    return float((errors[known] * counts).sum()) / total if total > 0 else None
