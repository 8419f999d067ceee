# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in plain torch and float32: what a call means, and what runs without a GPU.

Tensors of tokens are laid out (B, H, N, D).
"""

from .attend import Attended, attend
from .operands import Operands
from .pipeline import attention
from .route import Route, poolable, route
from .scores import block_scores, log_scores

__all__ = [
    "Attended",
    "Operands",
    "Route",
    "attend",
    "attention",
    "block_scores",
    "log_scores",
    "poolable",
    "route",
]
