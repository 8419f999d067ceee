# SPDX-License-Identifier: Apache-2.0
"""2^x in fixed point: its error, its ends, and the bits that the kernel makes it from."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sparge.kernels.spec import Element
from tests.oracle import ARITHMETIC, E4M3_MAX, HOPPER_SOFTMAX
from tests.oracle.fixed_exp2 import FIXED_TILES, HIGH, LOW, fixed_exp2, is_fixed

E4M3 = ARITHMETIC[Element.INT8_E4M3]
TOP = math.log2(E4M3_MAX)
SMALLEST_NORMAL, SMALLEST = -6, -9  # log2, of E4M3


def codes(x: Tensor) -> Tensor:
    return E4M3.round(fixed_exp2(x).float()).double()


def octaves(low: float, high: float) -> Tensor:
    return torch.linspace(low, high, 1 << 20, dtype=torch.float64).float()


def test_a_code_is_as_near_as_that_of_2_to_the_x_and_no_more_to_one_side() -> None:
    x = octaves(SMALLEST_NORMAL, SMALLEST_NORMAL + 14)
    truth = torch.exp2(x.double())
    unrounded = fixed_exp2(x).double() / truth - 1
    assert LOW < unrounded.min() < 0.97 * LOW and 0.97 * HIGH < unrounded.max() < HIGH
    error, best = codes(x) / truth - 1, E4M3.round(truth.float()).double() / truth - 1
    assert error.square().mean().sqrt() < 1.025 * best.square().mean().sqrt()
    assert (error.mean() - best.mean()).abs() < 1e-4
    subnormal = octaves(SMALLEST - 2, SMALLEST_NORMAL)
    truth = torch.exp2(subnormal.double())
    off = (codes(subnormal) - truth).abs()
    assert (off <= 2.0**SMALLEST / 2 + max(-LOW, HIGH) * truth).all()


def test_it_saturates_ends_at_zero_and_never_falls() -> None:
    assert codes(torch.tensor([TOP, TOP + 0.1, 10.0])).tolist() == [E4M3_MAX] * 3
    assert not codes(torch.tensor([-math.inf, -1e30, -1000.0, -14.0, SMALLEST - 1.03])).any()
    assert (fixed_exp2(octaves(-16, 10)).diff() >= 0).all()


def test_is_what_the_bits_of_the_kernel_are() -> None:
    """Sixteen times a step number is a half; one FMA adds the one half an octave on."""
    steps = torch.arange(1600)
    x = (steps / 64 - 13.942620).float()
    line = (steps * 16).short().view(torch.float16).double()
    next_line = (steps * 16 + 0x200).short().view(torch.float16).double()
    root_half = torch.tensor(0x39A8).short().view(torch.float16).double()
    fma = (next_line * root_half + line).half()  # exact in float64, then one rounding
    assert torch.equal(codes(x), E4M3.round(fma.float()).double())


def test_the_place_of_a_key_in_two_blocks_alone_decides_which_are_fixed() -> None:
    places = [bool(FIXED_TILES >> key % 64 // 8 & 1) for key in range(128)]
    assert is_fixed(128, torch.device("cpu")).tolist() == places
    x = torch.linspace(-12, 0, 3 * 128).view(128, 3).T
    stored, sums = HOPPER_SOFTMAX.weigh(x, E4M3)
    plain, _ = replace(HOPPER_SOFTMAX, fixed_exp2=False).weigh(x, E4M3)
    assert torch.equal(stored, torch.where(torch.tensor(places), codes(x + TOP).float(), plain))
    assert torch.equal(sums, stored.sum(-1, keepdim=True) / E4M3_MAX)
