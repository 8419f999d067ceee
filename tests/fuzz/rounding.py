# SPDX-License-Identifier: Apache-2.0
"""Roundings of the number formats that a call computes in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparge import Precision
from tests.fuzz.oracle import Setting

#: Half the distance of neighbouring numbers, relative to the lower power of two, and the distance
#: below which they lie no closer, halved.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
FLOOR = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}
INT8_LEVELS = 127
E4M3_MAX = 448
WITH_E4M3 = ((8, 9), (9, 0), (12, 0), (12, 1))
#: Compute capability that the reference emulates; None: that of no GPU.
CPU_IS_LIKE: tuple[int, int] | None = None


@dataclass(frozen=True)
class Arithmetic:
    """Relative and absolute roundings of P (in units of the row's largest) and of V (of its largest
    in the channel)."""

    p_unit: float
    p_floor: float
    v_unit: float
    v_floor: float
    sums_rounded: bool = False
    """Row sums are of the rounded P."""
    float_unit: float = 2.0**-23
    """Unit of sums in the tensor cores."""

    @classmethod
    def of(cls, setting: Setting) -> Arithmetic:
        case = setting.case
        if case.policy.precision is Precision.SIXTEEN_BIT:
            return cls(
                UNIT[torch.float16 if half_only(setting) else torch.bfloat16], 2.0**-25, 0, 0
            )
        capability = _capability(case.q.device)
        if case.policy.precision is Precision.INT8 and capability in WITH_E4M3:
            # 3 bits, and 2^-10 where numbers are smallest; on 9.0 most of P comes from a fixed
            # point 2^x that is 1.54 % off at most and 0 below 2^-10 (fixed_exp2.cuh), and FP8
            # products are summed with 13 bits.
            on_hopper = capability == (9, 0)
            p_unit = 2.0**-4 + (0.0154 if on_hopper else 0)
            floor = 2.0**-10 / E4M3_MAX
            sums = 2.0**-13 if on_hopper else 2.0**-23
            return cls(p_unit, floor, 2.0**-4, floor, on_hopper, sums)
        return cls(2.0**-11, 2.0**-25, 2.0**-11, 2.0**-25 / E4M3_MAX)


def half_only(setting: Setting) -> bool:
    return all(getattr(setting.case, name).dtype == torch.float16 for name in "qkv")


def casts(setting: Setting) -> float:
    """Relative rounding of 16-bit operands of two types, one of which becomes the other."""
    types = {getattr(setting.case, name).dtype == torch.float16 for name in "qkv"}
    return UNIT[torch.bfloat16] if len(types) == 2 and not setting.eight_bit else 0.0


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else CPU_IS_LIKE
