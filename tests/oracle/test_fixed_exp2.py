# SPDX-License-Identifier: Apache-2.0
"""2^x in fixed point: the error that `tests.fuzz.rounding` counts with, and the kernel's bits."""

from __future__ import annotations

import torch

from sparge.kernels.spec import Element
from tests.oracle import ARITHMETIC
from tests.oracle.fixed_exp2 import HIGH, LOW, fixed_exp2

E4M3 = ARITHMETIC[Element.INT8_E4M3]


def test_the_error_before_e4m3_has_its_bounds_and_no_side() -> None:
    x = torch.linspace(-6, 8, 1 << 20, dtype=torch.float64).float()
    truth = torch.exp2(x.double())
    unrounded = fixed_exp2(x).double() / truth - 1
    assert LOW < unrounded.min() < 0.97 * LOW and 0.97 * HIGH < unrounded.max() < HIGH
    rounded, best = (E4M3.round(p.float()).double() / truth - 1 for p in (fixed_exp2(x), truth))
    assert (rounded.mean() - best.mean()).abs() < 1e-4


def test_is_what_the_bits_of_the_kernel_are() -> None:
    """Sixteen times a step number is a half; one FMA adds the one half an octave on."""
    steps = torch.arange(1600)
    x = (steps / 64 - 13.942620).float()
    line = (steps * 16).short().view(torch.float16).double()
    next_line = (steps * 16 + 0x200).short().view(torch.float16).double()
    root_half = torch.tensor(0x39A8).short().view(torch.float16).double()
    fma = (next_line * root_half + line).half()  # exact in float64, then one rounding
    assert torch.equal(E4M3.round(fixed_exp2(x).float()).double(), E4M3.round(fma.float()).double())
