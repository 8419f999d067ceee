# SPDX-License-Identifier: Apache-2.0
"""Head weight (`head_weight`): what the relative error of a head counts beside those of others.

The outputs of all heads go through one projection and are added to what the layers before have
left, so a loud head's error moves the model more than a quiet one's of the same relative size. In a
layer heads count by the norm of their output. Layers count by the root of theirs: each adds to a
sum that grows from layer to layer, and has its own gate (docs/experiments.md, Head weights).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

LEAST = 1e-6  # an infinite error stays infinite, whatever its head counts


def head_weight(norms: Array) -> Array:
    """(layers, heads) head weights of mean 1, from the norms of the heads' outputs in any unit."""
    of_layers = np.sqrt(norms.mean(1, keepdims=True))
    counts = np.divide(norms, of_layers, out=np.zeros_like(norms), where=of_layers > 0)
    mean = counts.mean()
    return np.maximum(counts / mean, LEAST) if mean > 0 else np.ones_like(norms)


def mean_error(errors: Tensor, head_weight: Tensor) -> float | None:
    """Mean error over the heads whose error is known (no NaN), each by its weight: what a target is
    of. None where no such head counts."""
    known = ~errors.isnan()
    counts = head_weight[known].double()
    total = float(counts.sum())
    return float((errors[known] * counts).sum()) / total if total > 0 else None
