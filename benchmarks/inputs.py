# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values for timing: random, with a little of what makes routing work."""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import Shape


def draw(shape: Shape, device: torch.device | str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """(1, H, N, D) views of NHD memory: slow drift along the tokens, noise, channel means."""
    generator = torch.Generator(device).manual_seed(0)

    def tensor(mean: float) -> Tensor:
        size = (1, shape.tokens, shape.heads, shape.head_dim)
        noise = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        knots = torch.randn(
            shape.heads * shape.head_dim, 1, shape.tokens // 64, generator=generator, device=device
        )
        drift = torch.nn.functional.interpolate(knots, size=shape.tokens, mode="linear")
        drift = drift.view(1, shape.heads, shape.head_dim, shape.tokens).permute(0, 3, 1, 2)
        offset = torch.randn(size[-2:], generator=generator, device=device) * mean
        return noise.mul_(0.5).add_(drift.to(noise.dtype)).add_(offset.to(noise.dtype))

    q, k, v = (tensor(mean).transpose(1, 2) for mean in (0.0, 1.0, 0.5))
    return q, k, v
