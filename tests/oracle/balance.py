# SPDX-License-Identifier: Apache-2.0
"""Q and K on the way to INT8: channels balanced and rotated (``csrc/common/balance.cuh``)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

ROTATED = 8  # neighbouring channels
LEAST_ROOT = 0.125  # of a channel's extent, relative to the largest
LEAST_EXCESS = 1.6


def balance(extent: Tensor) -> Tensor:
    """Factors (..., D) of Q's channels, from the extents of K's, powers of two near their roots; 0
    where heads stay as they are."""
    roots = _of_bits((_bits(extent) >> 1) + 0x1FC00000)
    most, mean = roots.amax(-1, keepdim=True), roots.mean(-1, keepdim=True)
    rounded = _of_bits((_bits(roots.maximum(most * LEAST_ROOT)) + 0x00400000) & 0x7F800000)
    return rounded.masked_fill(~(most > LEAST_EXCESS * mean), 0)


def _bits(x: Tensor) -> Tensor:
    return x.float().contiguous().view(torch.int32)


def _of_bits(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def rotate(x: Tensor) -> Tensor:
    """Each eight neighbouring channels of x (..., D) times the Hadamard matrix: (..., D or more).

    H (a, b) = (H a + H b, H a - H b), so that (H x).(H y) = 8 x.y.
    """
    x = _padded(x)
    for step in (1, 2, 4):
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
    return x


def of_queries(q: Tensor, factors: Tensor) -> Tensor:
    """q (..., D) times `balance`, rotated, as kept in bf16."""
    rotated = rotate(q * factors).bfloat16().float()
    return torch.where(_balances(factors), rotated, _padded(q))


def of_keys(k: Tensor, factors: Tensor) -> Tensor:
    """k (..., D) over `balance`, rotated, such that products with queries stay."""
    rotated = rotate(k * (1 / (ROTATED * factors)))
    return torch.where(_balances(factors), rotated, _padded(k))


def _balances(factors: Tensor) -> Tensor:
    return factors.amax(-1, keepdim=True) > 0


def _padded(x: Tensor) -> Tensor:
    return pad(x, (0, -x.shape[-1] % ROTATED))
