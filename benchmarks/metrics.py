# SPDX-License-Identifier: Apache-2.0
"""Distances of one tensor from another: sums in float64, results as Python floats."""

from __future__ import annotations

import math

from torch import Tensor


def rel_l1(value: Tensor, truth: Tensor) -> float:
    """Sum of |value - truth| over sum of |truth|; both tensors of one shape, any float dtype."""
    value, truth = _aligned(value, truth)
    return _ratio(float((value - truth).abs().sum()), float(truth.abs().sum()))


def rel_l2(value: Tensor, truth: Tensor) -> float:
    """Euclidean norm of value - truth over that of truth."""
    value, truth = _aligned(value, truth)
    return _ratio(float((value - truth).norm()), float(truth.norm()))


def cosine(value: Tensor, truth: Tensor) -> float:
    """Cosine of the angle between the two tensors, read as vectors; 1 for two zero tensors."""
    value, truth = _aligned(value, truth)
    lengths = float(value.norm()) * float(truth.norm())
    if lengths == 0:
        return 1.0 if float((value - truth).abs().sum()) == 0 else 0.0
    return float((value * truth).sum()) / lengths


def _aligned(value: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    if value.shape != truth.shape:
        raise ValueError(
            f"The two tensors have shapes {tuple(value.shape)} and {tuple(truth.shape)}; "
            "pass tensors of one shape."
        )
    return value.detach().double(), truth.detach().to(value.device).double()


def _ratio(error: float, size: float) -> float:
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size
