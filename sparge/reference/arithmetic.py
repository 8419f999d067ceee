# SPDX-License-Identifier: Apache-2.0
"""Formats in which each kernel element type stores its operands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.spec import Element

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Arithmetic:
    """Formats of the two products of one element type; sums are float32 in all of them."""

    quantized_qk: bool
    """INT8 Q and K around mean(K), and V around mean(V) scaled by channel; else plain casts."""
    dtype: torch.dtype
    """Dtype that P and V are rounded to (and Q and K too, when they are not quantized)."""
    p_peak: float = 1.0
    """Stored value of the largest P: E4M3 uses its whole range."""

    def round(self, values: Tensor) -> Tensor:
        """Rounds float32 values to the nearest ones that `dtype` has; E4M3 saturates."""
        if self.dtype == torch.float8_e4m3fn:
            values = values.clamp(-E4M3_MAX, E4M3_MAX)
        return values.to(self.dtype)


ARITHMETIC = {
    Element.INT8_FP16: Arithmetic(True, torch.float16),
    Element.INT8_E4M3: Arithmetic(True, torch.float8_e4m3fn, p_peak=E4M3_MAX),
    Element.BF16: Arithmetic(False, torch.bfloat16),
    Element.FP16: Arithmetic(False, torch.float16),
}
