# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the kernels: formats of each element type's operands, and their softmaxes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparge.kernels.spec import Element

from .fixed_exp2 import fixed_exp2, is_fixed

E4M3_MAX = 448.0
INT8_MAX = 127.0
UINT8_MAX = 255.0


def rounding_shifts(keys: int, device: torch.device) -> Tensor:
    """(keys,) of whole blocks: what is added to integer P before it is rounded, in levels.

    Keys 8, 10, 12 and 14 of each sixteen are shifted. So 8 of a block round up from 0.02 of a level
    on, 8 from 0.98 on, 48 from 0.5 on. Where P spreads evenly over its logarithm, sums are right on
    average: the mean of log Gamma of these thresholds is nearly log(2 pi) / 2
    (`docs/experiments.md`, "Rounding of integer P").
    """
    key = torch.arange(keys, device=device)
    shifted = (key % 16 >= 8) & (key % 2 == 0)
    return torch.where(shifted, torch.where(key % 32 < 16, 0.48, -0.48), 0.0)


@dataclass(frozen=True)
class Arithmetic:
    """Formats of the two products of one element type; sums are float32 in all of them."""

    quantized_qk: bool
    """INT8 Q and K around mean(K), and V around mean(V) scaled by channel; else plain casts."""
    dtype: torch.dtype
    """Dtype that P and V are rounded to (and Q and K too, when they are not quantized)."""
    p_peak: float = 1.0
    """Stored value of the largest P: E4M3 uses its whole range, and integers all of a byte."""

    @property
    def integer_pv(self) -> bool:
        """P in unsigned levels of its row's largest in the key block, V in levels whose scale is
        that of the channel times one of the block. Row sums are of P's levels.
        """
        return self.dtype == torch.int8

    def round(self, values: Tensor) -> Tensor:
        """Rounds float32 values to the nearest ones that `dtype` has; E4M3 and INT8 saturate."""
        if self.integer_pv:
            values = values.round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(0)
        if self.dtype == torch.float8_e4m3fn:
            values = values.clamp(-E4M3_MAX, E4M3_MAX)
        return values.to(self.dtype)


ARITHMETIC = {
    Element.INT8_FP16: Arithmetic(True, torch.float16),
    Element.INT8_E4M3: Arithmetic(True, torch.float8_e4m3fn, p_peak=E4M3_MAX),
    Element.INT8_INT8: Arithmetic(True, torch.int8, p_peak=UINT8_MAX),
    Element.BF16: Arithmetic(False, torch.bfloat16),
    Element.FP16: Arithmetic(False, torch.float16),
}


@dataclass(frozen=True)
class OnlineSoftmax:
    """Differences between the softmaxes of the attend kernels; the defaults are those of
    mma.sync.
    """

    step_blocks: int = 1
    """Kept blocks after which the running maximum is taken; P is rounded relative to it."""
    sums_rounded: bool = False
    """Whether the row sums are of P as it was rounded: the tensor cores add them beside the
    values.
    """
    fixed_exp2: bool = False
    """Whether P of some keys of a step is computed in fixed point (`fixed_exp2`)."""

    def weigh(
        self, x: Tensor, arithmetic: Arithmetic, worth: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """P = 2^x as it is stored, in units of 1 / p_peak, and its sums; x is (..., keys).

        worth: (..., keys), factors on P in the sums of integer P, which are of P unrounded then.
        """
        if arithmetic.integer_pv:
            most = x.amax(-1, keepdim=True)
            p = torch.exp2(x - finite(most))
            levels = (p * arithmetic.p_peak + rounding_shifts(x.shape[-1], x.device)).round()
            stored = levels * torch.exp2(most)
            summed = stored / arithmetic.p_peak if worth is None else p * torch.exp2(most) * worth
            return stored, summed.sum(-1, keepdim=True)
        p = torch.exp2(x)
        exact = p * arithmetic.p_peak
        if self.fixed_exp2:
            fixed = fixed_exp2(x + math.log2(arithmetic.p_peak)).float()
            exact = torch.where(is_fixed(x.shape[-1], x.device), fixed, exact)
        stored = arithmetic.round(exact).float()
        if not self.sums_rounded:
            return stored, p.sum(-1, keepdim=True)
        return stored, stored.sum(-1, keepdim=True) / arithmetic.p_peak


PORTABLE_SOFTMAX = OnlineSoftmax()
#: Softmaxes of the sm_90a kernels, of 8-bit and of 16-bit operands.
HOPPER_SOFTMAX = OnlineSoftmax(step_blocks=2, sums_rounded=True, fixed_exp2=True)
HOPPER_SOFTMAX_16 = OnlineSoftmax(step_blocks=2)


def finite(maximum: Tensor) -> Tensor:
    """Maximum that is safe to subtract: rows without any logit yet have 0 rather than -inf, which
    would give NaN."""
    return maximum.masked_fill(maximum == -torch.inf, 0)
