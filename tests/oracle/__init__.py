# SPDX-License-Identifier: Apache-2.0
"""The kernels' own arithmetic, emulated: operands, sums and softmaxes rounded where theirs are.

`sparge.reference` says what a call means, and chooses the blocks here too. On one device the same
input gives the same bits.
"""

from .arithmetic import (
    ARITHMETIC,
    E4M3_MAX,
    HOPPER_SOFTMAX,
    HOPPER_SOFTMAX_16,
    PORTABLE_SOFTMAX,
    UINT8_MAX,
    OnlineSoftmax,
)
from .attend import attend
from .quantize import Quantized, quantize_qkv, sampled_mean

__all__ = [
    "ARITHMETIC",
    "E4M3_MAX",
    "HOPPER_SOFTMAX",
    "HOPPER_SOFTMAX_16",
    "PORTABLE_SOFTMAX",
    "UINT8_MAX",
    "OnlineSoftmax",
    "Quantized",
    "attend",
    "quantize_qkv",
    "sampled_mean",
]
