# SPDX-License-Identifier: Apache-2.0
"""2^x in fixed point: its error, its ends, and the bits that the kernel makes it from."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sparge.kernels.spec import Element
from sparge.reference.arithmetic import ARITHMETIC, E4M3_MAX, HOPPER_SOFTMAX
from sparge.reference.fixed_exp2 import FIXED_TILES, HIGH, LOW, fixed_exp2, is_fixed

E4M3 = ARITHMETIC[Element.INT8_E4M3]
TOP = math.log2(E4M3_MAX)
SMALLEST_NORMAL, SMALLEST = -6, -9  # log2, of E4M3


def codes(x: Tensor) -> Tensor:
    return E4M3.round(fixed_exp2(x).float()).double()


def octaves(low: float, high: float) -> Tensor:
    return torch.linspace(low, high, 1 << 20, dtype=torch.float64).float()


def test_error_before_rounding() -> None:
    x = octaves(SMALLEST - 1, TOP)
    error = fixed_exp2(x).double() / torch.exp2(x.double()) - 1
    assert LOW < error.min() < 0.97 * LOW
    assert 0.97 * HIGH < error.max() < HIGH


def test_error_and_bias_of_a_code() -> None:
    """Beside 2^x itself rounded to E4M3: as large, and no more to one side."""
    x = octaves(SMALLEST_NORMAL, SMALLEST_NORMAL + 14)
    truth = torch.exp2(x.double())
    error, best = codes(x) / truth - 1, E4M3.round(truth.float()).double() / truth - 1
    assert error.abs().max() < (1 + 2**-4) * (1 + max(-LOW, HIGH)) - 1
    assert error.square().mean().sqrt() < 1.025 * best.square().mean().sqrt()
    assert (error.mean() - best.mean()).abs() < 1e-4


def test_subnormal_codes_are_off_by_little_more_than_half_a_step() -> None:
    x = octaves(SMALLEST - 2, SMALLEST_NORMAL)
    truth = torch.exp2(x.double())
    step = 2.0**SMALLEST
    assert ((codes(x) - truth).abs() <= step / 2 + max(-LOW, HIGH) * truth).all()
    assert codes(x).unique().numel() == 9, "zero, seven subnormals and the smallest normal"


def test_ends_and_order() -> None:
    assert codes(torch.tensor([TOP, TOP + 0.1, 10.0])).tolist() == [E4M3_MAX] * 3
    low = torch.tensor([-math.inf, -1e30, -1000.0, -20.0, -14.0, SMALLEST - 1.03])
    assert codes(low).tolist() == [0.0] * len(low)
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
    # The float32 that is converted: its unit is the smallest half.
    assert torch.equal((steps * 2.0**-24).half().view(torch.int16).long(), steps)


def test_the_place_of_a_key_alone_decides() -> None:
    """It decides in a step of two blocks, whatever the scores; keys of tiles that are left out are
    exact."""
    places = [bool(FIXED_TILES >> key % 64 // 8 & 1) for key in range(128)]
    assert is_fixed(128, torch.device("cpu")).tolist() == places
    x = torch.linspace(-12, 0, 3 * 128).view(128, 3).T
    stored, sums = HOPPER_SOFTMAX.weigh(x, E4M3)
    plain, _ = replace(HOPPER_SOFTMAX, fixed_exp2=False).weigh(x, E4M3)
    fixed = codes(x + TOP).float()
    assert torch.equal(stored, torch.where(torch.tensor(places), fixed, plain))
    assert torch.equal(sums, stored.sum(-1, keepdim=True) / E4M3_MAX)
