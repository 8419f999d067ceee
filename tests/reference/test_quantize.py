# SPDX-License-Identifier: Apache-2.0
"""Operands that the attend stage reads are as close to the inputs as their formats allow."""

from __future__ import annotations

import pytest
import torch

from sparge.kernels.spec import Element
from sparge.reference import quantize_qkv

LENGTHS = [1, 64, 129, 799]
INT8_ELEMENTS = [Element.INT8_FP16, Element.INT8_E4M3]
# Half a unit in the last place, relative: 10, 7 and 3 mantissa bits.
HALF_ULP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4}


def per_key(scale: torch.Tensor, n_keys: int) -> torch.Tensor:
    return scale.repeat_interleave(64, -1)[..., :n_keys].unsqueeze(-1)


@pytest.mark.parametrize("element", INT8_ELEMENTS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_levels_are_within_half_a_step(make_qkv, tokens: int, element: Element) -> None:
    q, k, v = make_qkv(2, 2, tokens, 64)
    x = quantize_qkv(q, k, v, element=element)
    q_step, k_step = x.q_scale.unsqueeze(-1), per_key(x.k_scale, tokens)
    slack = 1 + 1e-5  # float32 rounding of the quotient
    assert ((x.q_levels * q_step - q.float()).abs() <= q_step / 2 * slack).all()
    centred = k.float() - x.kbar.unsqueeze(2)
    assert ((x.k_levels * k_step - centred).abs() <= k_step / 2 * slack).all()
    values = (v.float() - x.vbar.unsqueeze(2)) / x.v_scale.unsqueeze(2)
    smallest = 2.0**-10 if element == Element.INT8_E4M3 else 2.0**-25
    error = (x.v_levels.float() - values).abs()
    assert (error <= values.abs() * HALF_ULP[x.v_levels.dtype] * slack + smallest).all()
    assert values.abs().max() <= 448 * slack
    if tokens > 1:  # the whole range is used
        assert (x.q_levels.abs().amax(-1) == 127).all()
        assert (x.v_levels.float().abs().amax(2) == 448).all()
        blocks = torch.nn.functional.pad(x.k_levels, (0, 0, 0, -tokens % 64)).unflatten(2, (-1, 64))
        assert (blocks.abs().amax((-1, -2)) == 127).all()


@pytest.mark.parametrize(
    ("element", "dtype"), [(Element.BF16, torch.bfloat16), (Element.FP16, torch.float16)]
)
def test_sixteen_bit_copies_its_inputs(make_qkv, element: Element, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(1, 2, 129, 64, dtype=dtype)
    x = quantize_qkv(q, k + 5, v, element=element)
    for levels, given in ((x.q_levels, q), (x.k_levels, k + 5), (x.v_levels, v)):
        assert levels.dtype == dtype
        assert torch.equal(levels, given)
    for scale in (x.q_scale, x.k_scale, x.v_scale):
        assert (scale == 1).all()
    assert x.kbar.abs().max() == x.vbar.abs().max() == 0


def test_statistics_against_loops(make_qkv) -> None:
    q, k, v = make_qkv(2, 4, 300, 16, kv_heads=2, kv_tokens=200, dtype=torch.float16)
    k[0, 0, 70] = 0
    lengths = torch.tensor([150, 60], dtype=torch.int32)
    x = quantize_qkv(q, k, v, smooth_k=False, key_lengths=lengths)
    assert x.key_counts.tolist() == [[64, 64, 22, 0], [60, 0, 0, 0]]

    def check(mean: torch.Tensor, similarity: torch.Tensor, rows: torch.Tensor) -> None:
        rows = rows.double()
        unit = [row / row.norm() for row in rows if row.norm() > 0]
        expected = sum(unit).square().sum() / len(rows) ** 2  # type: ignore[union-attr]
        assert (mean - rows.mean(0)).abs().max() < 1e-6
        assert similarity == pytest.approx(float(expected), abs=1e-6)

    for b, length in enumerate(lengths.tolist()):
        for h in range(4):
            for i in range(3):
                rows = q[b, h, 128 * i : 128 * (i + 1)]
                check(x.q_block_mean[b, h, i], x.q_self_similarity[b, h, i], rows)
        for h in range(2):
            for j in range(-(-length // 64)):
                rows = k[b, h, :length][64 * j : 64 * (j + 1)]
                check(x.k_block_mean[b, h, j], x.k_self_similarity[b, h, j], rows)
    assert x.k_block_mean[1, :, 1:].abs().max() == 0


def test_given_means_are_used(make_qkv) -> None:
    q, k, v = make_qkv(2, 4, 100, 16, kv_heads=2)
    kbar, vbar = torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    v_scale = torch.rand(2, 2, 16) + 0.5
    x = quantize_qkv(q, k, v, kbar=kbar, vbar=vbar, v_scale=v_scale)
    assert torch.equal(x.kbar, kbar)
    assert torch.equal(x.vbar, vbar)
    assert torch.equal(x.v_scale, v_scale)
    back = x.k_levels * per_key(x.k_scale, 100) + kbar.unsqueeze(2)
    assert (back - k.float()).abs().max() <= x.k_scale.max() / 2 * 1.001
    back = x.v_levels.float() * v_scale.unsqueeze(2) + vbar.unsqueeze(2)
    assert (back - v.float()).abs().max() < 0.01


def test_zero_maxima_give_zero_levels(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 128, 16)
    q[:] = 0
    k[:] = 3
    v[..., 0] = 7
    x = quantize_qkv(q, k, v)
    assert float(x.v_scale[0, 0, 0]) == 1
    for levels in (x.q_levels, x.k_levels, x.v_levels[..., 0]):
        assert levels.float().abs().max() == 0
    for scale in (x.q_scale, x.k_scale):
        assert (scale > 0).all()
        assert scale.max() < 1e-6, "no logit may be as large as one level at scale 1"
    assert x.q_self_similarity.max() == 0


def test_values_near_the_fp16_limit_in_bf16(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 256, 16)
    v = (v * 1e5).bfloat16()
    x = quantize_qkv(q, k, v)
    back = x.v_levels.float() * x.v_scale.unsqueeze(2) + x.vbar.unsqueeze(2)
    assert v.abs().max() > 65504
    assert (back - v.float()).abs().max() <= v.float().abs().max() * 2.0**-10
