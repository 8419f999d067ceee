# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in plain torch: the oracle of the tests, and what runs without an NVIDIA GPU.

Every stage is written from the maths, in float32, with the values rounded where the kernels round
them. Tensors are laid out (B, H, N, D) throughout.
"""

from .attend import Attended, attend
from .budgeted import bucket_partials, budgeted_attention
from .choose import Choice, choose_blocks, error_scores, mass_scores, poolable
from .exact import exact_attention
from .exact_pooled import exact_pooled_attention
from .packed import Packed, gather, pack_qkv, scatter
from .partial import Partial, combine
from .pipeline import attention, make_plan, reference_element
from .pooled import attend_packed
from .quantize import Quantized, quantize_qkv
from .route import block_scores, route

__all__ = [
    "Attended",
    "Choice",
    "Packed",
    "Partial",
    "Quantized",
    "attend",
    "attend_packed",
    "attention",
    "block_scores",
    "bucket_partials",
    "budgeted_attention",
    "choose_blocks",
    "combine",
    "error_scores",
    "exact_attention",
    "exact_pooled_attention",
    "gather",
    "make_plan",
    "mass_scores",
    "pack_qkv",
    "poolable",
    "quantize_qkv",
    "reference_element",
    "route",
    "scatter",
]
