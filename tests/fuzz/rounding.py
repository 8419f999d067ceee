# SPDX-License-Identifier: Apache-2.0
"""Roundings of the number formats that a call computes in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparge import Precision
from sparge.kernels import capabilities
from tests.fuzz.oracle import Setting

#: Half the distance of neighbouring numbers, relative to the lower power of two, and the distance
#: below which they lie no closer, halved.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
FLOOR = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}
INT8_LEVELS = 127
UINT8_LEVELS = 255
E4M3_MAX = 448
WITH_INTEGERS = ((8, 6), (8, 9), (12, 0), (12, 1))
#: Compute capability that a CPU emulates; None: it computes in float32.
CPU_IS_LIKE: tuple[int, int] | None = None
#: Compute capabilities whose kernels tests run on a Hopper GPU.
LAYOUTS = {"86": (8, 6), "89": (8, 9), "120": (12, 0)}


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
    int8: bool = True
    """Queries and keys have INT8 levels."""
    mean_unit: float = UNIT[torch.bfloat16]
    """Relative rounding of the statistics that blocks are ranked by, and of 16-bit pooled keys."""

    @classmethod
    def of(cls, setting: Setting) -> Arithmetic:
        case = setting.case
        if case.q.device.type == "cpu" and CPU_IS_LIKE is None:
            return IN_FLOAT32
        if case.policy.precision is Precision.SIXTEEN_BIT:
            return cls(
                UNIT[torch.float16 if half_only(setting) else torch.bfloat16],
                *(2.0**-25, 0, 0),
                int8=False,
            )
        capability = _capability(case.q.device)
        if case.policy.precision is Precision.INT8 and capability in WITH_INTEGERS:
            return cls(0, 0.5 / UINT8_LEVELS, 0, 0.5 / INT8_LEVELS, sums_rounded=True)
        if case.policy.precision is Precision.INT8 and capability == (9, 0):
            # 3 bits, and 2^-10 where numbers are smallest; most of P comes from a fixed point 2^x
            # that is 1.54 % off at most and 0 below 2^-10 (fixed_exp2.cuh), and FP8 products are
            # summed with 13 bits.
            floor = 2.0**-10 / E4M3_MAX
            return cls(2.0**-4 + 0.0154, floor, 2.0**-4, floor, True, 2.0**-13)
        return cls(2.0**-11, 2.0**-25, 2.0**-11, 2.0**-25 / E4M3_MAX)


IN_FLOAT32 = Arithmetic(2.0**-24, 0, 0, 0, int8=False, mean_unit=0)


def half_only(setting: Setting) -> bool:
    return all(getattr(setting.case, name).dtype == torch.float16 for name in "qkv")


def casts(setting: Setting) -> float:
    """Relative rounding of 16-bit operands of two types, one of which becomes the other."""
    types = {getattr(setting.case, name).dtype == torch.float16 for name in "qkv"}
    sixteen_bit = not setting.eight_bit and Arithmetic.of(setting) is not IN_FLOAT32
    return UNIT[torch.bfloat16] if len(types) == 2 and sixteen_bit else 0.0


def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda":
        return CPU_IS_LIKE
    _, layout_of, number = capabilities(device).arch.partition("_as_")
    return LAYOUTS[number] if layout_of else torch.cuda.get_device_capability(device)
