# SPDX-License-Identifier: Apache-2.0
"""Attention calls of real models at usual sizes."""

from __future__ import annotations

from dataclasses import dataclass

from sparge import TokenGrid


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    tokens: int
    head_dim: int
    grid: TokenGrid

    def flops(self, density: float = 1.0) -> float:
        """Multiply-adds of QK and PV, counted as two operations each."""
        return 4.0 * self.heads * self.tokens**2 * self.head_dim * density


#: Those that have bars come first, then the others by their work.
SHAPES = {
    shape.name: shape
    for shape in (
        # Mochi, 848x480x163
        Shape("mochi", 24, 44776, 128, TokenGrid(28, 30, 53, suffix=256)),
        # CogVideoX-2B, 720x480x49
        Shape("cogx2b", 30, 17776, 64, TokenGrid(13, 30, 45, prefix=226)),
        # Flux, 1024 x 1024
        Shape("flux1k", 24, 4608, 128, TokenGrid(1, 64, 64, prefix=512)),
        # CogVideoX-5B, as 2B
        Shape("cogx5b", 48, 17776, 64, TokenGrid(13, 30, 45, prefix=226)),
        # Wan 14B, 832x480x81
        Shape("wan480", 40, 32760, 128, TokenGrid(21, 30, 52)),
        # Wan 14B, 1280x720x81
        Shape("wan720", 40, 75600, 128, TokenGrid(21, 45, 80)),
        # HunyuanVideo, 1280x720x129
        Shape("hunyuan", 24, 119056, 128, TokenGrid(33, 45, 80, prefix=256)),
    )
}
