# SPDX-License-Identifier: Apache-2.0
"""The emulated arithmetic rounds where a kernel's loop does; tests/fuzz has all the rest."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.inputs import draw
from benchmarks.metrics import rel_l1
from benchmarks.shapes import Shape
from sparge import TokenGrid, reference
from sparge.kernels.spec import Element
from sparge.reference import Operands
from tests.oracle import ARITHMETIC, PORTABLE_SOFTMAX, attend, quantize_qkv

SCALE, ROWS, KEYS = 0.1, 128, 500


@pytest.mark.parametrize("element", list(Element))
def test_p_is_rounded_beside_the_running_maximum(make_qkv, element: Element) -> None:
    """An online softmax in float64: a block at a time, its sums rescaled as the maximum grows."""
    q, k, v = make_qkv(1, 1, ROWS, 32, kv_tokens=KEYS, dtype=torch.float16)
    wave = 2 * torch.linspace(-1, 8, KEYS).sin().unsqueeze(-1)  # tens of log2 units
    x = quantize_qkv(q + 1, k + wave.half(), v, element=element)
    factor = x.q_scale[0, 0].double()[:, None] * SCALE * math.log2(math.e)
    maximum = torch.full((ROWS, 1), -math.inf, dtype=torch.float64)
    total, rounded, unrounded = torch.zeros(3, ROWS, 32, dtype=torch.float64)
    for block in range(-(-KEYS // 64)):
        keys = slice(64 * block, 64 * block + 64)
        logits = x.q_levels[0, 0].double() @ x.k_levels[0, 0, keys].double().T
        logits = logits * factor * x.k_scale[0, 0, block].double()
        grown = torch.maximum(maximum, logits.amax(-1, keepdim=True))
        shrink, p = torch.exp2(maximum - grown), torch.exp2(logits - grown)
        peak = ARITHMETIC[element].p_peak
        if element is Element.INT8_INT8:
            most = torch.exp2(logits.amax(-1, keepdim=True) - grown)
            shift = torch.tensor(([0] * 8 + [0.48, 0] * 4 + [0] * 8 + [-0.48, 0] * 4) * 2)
            stored = (p / most * peak + shift[: p.shape[-1]]).round() / peak * most
        else:
            stored = ARITHMETIC[element].round(p.float() * peak).double() / peak
        values = x.v_levels[0, 0, keys].double() * x.v_scale[0, 0].double()
        values = values * x.v_block_scale[0, 0, block].double()
        rounded, unrounded = rounded * shrink + stored @ values, unrounded * shrink + p @ values
        summed = stored if element is Element.INT8_INT8 else p
        total = total * shrink + summed.sum(-1, keepdim=True)
        maximum = grown
    kept = torch.ones(1, 1, 1, -(-KEYS // 64), dtype=torch.bool)
    found = attend(x, kept, scale=SCALE)
    assert (found.row_max[0, 0] - maximum[:, 0]).abs().max() < 1e-4
    torch.testing.assert_close(found.row_sum[0, 0].double(), total[:, 0], rtol=1e-4, atol=0)
    error = found.unnormalised[0, 0] - rounded - total * x.vbar[0, 0].double()
    # A few P straddle a midpoint between float32 and float64 and round the other way.
    assert error.norm() < 0.3 * (rounded - unrounded).norm()


def test_sums_of_small_integer_p_are_right_on_average() -> None:
    """To the nearest level alone they would come out too small."""
    exponents = -20 * torch.rand(4096, 16, 64)
    exponents[..., 0] = 0
    integer = ARITHMETIC[Element.INT8_INT8]
    stored, sums = PORTABLE_SOFTMAX.weigh(exponents, integer)
    exact = torch.exp2(exponents).sum().item()
    nearest = (torch.exp2(exponents) * 255).round().sum().item() / 255
    assert sums.sum().item() == pytest.approx(stored.sum().item() / 255)
    assert sums.sum().item() == pytest.approx(exact, rel=3e-4)
    assert nearest < 0.9992 * exact


@pytest.mark.parametrize("element", list(Element))
def test_many_blocks_are_pooled_in_tiles_of_64_one_of_them_empty(make_qkv, element) -> None:
    """Random calls of tests/fuzz have fewer blocks."""
    q, k, v = make_qkv(1, 4, 100, 16, kv_heads=2, kv_tokens=135 * 64 + 20)
    k = 2 * k[:, :, ::64].repeat_interleave(64, 2)[:, :, : k.shape[2]] + k / 2
    weights, blocks = torch.tensor([1.0, 0.0, 0.4, 2.5]), torch.arange(136)
    kept = (blocks % 3 == 0).expand(1, 4, 1, 136)
    pooled = ~kept & (blocks // 64 != 1) & (weights > 0)[:, None, None]
    found = attend(quantize_qkv(q, k, v, element=element), kept, pooled, weights, scale=0.25)
    exact = reference.attend(Operands.of(q, k, v), kept, pooled, weights, scale=0.25)
    limits = {Element.INT8_E4M3: 0.04, Element.INT8_INT8: 0.02}
    assert rel_l1(found.out, exact.out) < limits.get(element, 0.015)
    assert (found.lse - exact.lse).abs().max() < 0.1


@pytest.mark.parametrize(
    ("element", "limit"),
    [
        (Element.INT8_FP16, 0.005),
        (Element.INT8_E4M3, 0.01),
        (Element.INT8_INT8, 0.006),
        (Element.BF16, 0.003),
    ],
)
def test_dense_error_on_smooth_data(element: Element, limit: float) -> None:
    q, k, v = draw(Shape("small", 6, 1566, 64, TokenGrid(4, 16, 24, suffix=30)), "cpu")
    kept = torch.ones(1, 6, 13, 25, dtype=torch.bool)
    found = attend(quantize_qkv(q, k, v, element=element), kept, scale=0.125).out
    exact = reference.attend(Operands.of(q, k, v), kept, scale=0.125).out
    for head in range(6):
        assert rel_l1(found[:, head], exact[:, head]) <= limit, head
