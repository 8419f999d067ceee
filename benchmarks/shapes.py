# SPDX-License-Identifier: Apache-2.0
"""The attention calls of real models at usual sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    tokens: int
    head_dim: int

    def flops(self, density: float = 1.0) -> float:
        """Multiply-adds of QK and PV, counted as two operations each."""
        return 4.0 * self.heads * self.tokens**2 * self.head_dim * density


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("flux1k", 24, 4608, 128),  # Flux, 1024 x 1024, 512 text tokens
        Shape("cogx2b", 30, 17776, 64),  # CogVideoX-2B, 720x480x49, 226 text tokens
        Shape("cogx5b", 48, 17776, 64),
        Shape("wan480", 40, 32760, 128),  # Wan 14B, 832x480x81
        Shape("mochi", 24, 44776, 128),  # Mochi, 848x480x163, 256 text tokens
        Shape("wan720", 40, 75600, 128),
        Shape("hunyuan", 24, 119056, 128),  # HunyuanVideo, 1280x720x129, 256 text tokens
    )
}
