# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in plain torch: the oracle of the tests, and what runs without an NVIDIA GPU.

Every stage is written from the maths, in float32, with the values rounded where the kernels round
them. Tensors are laid out (B, H, N, D) throughout.
"""

from .attend import Attended, attend
from .exact import exact_attention
from .pipeline import attention, make_plan, reference_element
from .quantize import Quantized, quantize_qkv
from .route import block_scores, route

__all__ = [
    "Attended",
    "Quantized",
    "attend",
    "attention",
    "block_scores",
    "exact_attention",
    "make_plan",
    "quantize_qkv",
    "reference_element",
    "route",
]
