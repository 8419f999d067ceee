# SPDX-License-Identifier: Apache-2.0
"""Attention calls small enough for every test: neighbours are alike, and no block count divides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.quality.judge import Call
from benchmarks.quality_data.layer import Layer
from sparge.order.grid import TokenGrid

HEADS, HEAD_DIM = 2, 32
GRID = TokenGrid(5, 13, 17, prefix=5)  # 1,110 tokens: 9 query blocks, 18 key blocks


@pytest.fixture
def video(generator: torch.Generator) -> Call:
    """Two heads over GRID; the first looks at its neighbours, the second at nearly everything."""
    axes = (torch.arange(n) for n in (GRID.frames, GRID.height, GRID.width))
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 2).float()
    waves = torch.randn(3, HEAD_DIM, generator=generator) / 3
    text = torch.randn(GRID.prefix, HEAD_DIM, generator=generator)
    field = torch.cat([text, (place @ waves).sin()])
    strength = torch.tensor([1.7, 0.7])[:, None, None]

    def draw(noise: float) -> Tensor:
        random = torch.randn(1, HEADS, GRID.tokens, HEAD_DIM, generator=generator)
        return (strength * field + noise * random).bfloat16()

    return Call(Layer("made", draw(0.3), draw(0.3), draw(0.5), GRID))
