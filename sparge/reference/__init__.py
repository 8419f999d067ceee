# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in plain torch: the oracle of the tests, and what runs without an NVIDIA GPU.

Every stage is written from the maths, in float32, with the values rounded where the kernels round
them. Tensors are laid out (B, H, N, D) throughout.
"""

from .attend import Attended, attend
from .exact import exact_attention
from .pipeline import attention
from .quantize import quantize_qkv
from .quantized import Quantized, scatter
from .route import Route, poolable, route
from .scores import block_scores, log_scores

__all__ = [
    "Attended",
    "Quantized",
    "Route",
    "attend",
    "attention",
    "block_scores",
    "exact_attention",
    "log_scores",
    "poolable",
    "quantize_qkv",
    "route",
    "scatter",
]
