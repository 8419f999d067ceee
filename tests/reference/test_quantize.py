# SPDX-License-Identifier: Apache-2.0
"""Operands as close to the inputs as their formats allow; tests/fuzz judges block statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparge.kernels.spec import Element
from sparge.order.grid import TokenGrid, cube_order
from sparge.reference import key_mean, quantize_qkv

GRID = TokenGrid(3, 7, 9, prefix=70, suffix=75)  # 70 + 189 + 75 tokens: every segment is ragged
# Half a unit in the last place, relative, and the smallest step: of V.
V_ROUNDING = {Element.INT8_FP16: (2.0**-11, 2.0**-25), Element.INT8_E4M3: (2.0**-4, 2.0**-10)}


def per_key(scale: torch.Tensor, n_keys: int) -> torch.Tensor:
    return scale.repeat_interleave(64, -1)[..., :n_keys].unsqueeze(-1)


@pytest.mark.parametrize("element", V_ROUNDING)
@pytest.mark.parametrize("given", [(), ("kbar", "vbar")], ids=["own means", "given means"])
def test_levels_are_within_half_a_step(make_qkv, element: Element, given: tuple[str, ...]) -> None:
    q, k, v = make_qkv(2, 2, 129, 64)
    means: dict[str, Any] = {name: torch.randn(2, 2, 64) for name in given}
    x = quantize_qkv(q, k, v, element=element, **means)
    assert all(torch.equal(getattr(x, name), mean) for name, mean in means.items())
    q_step, k_step = x.q_scale.unsqueeze(-1), per_key(x.k_scale, 129)
    slack = 1 + 1e-5  # float32 rounding of the quotient
    assert ((x.q_levels * q_step - q.float()).abs() <= q_step / 2 * slack).all()
    centred = k.float() - x.kbar.unsqueeze(2)
    assert ((x.k_levels * k_step - centred).abs() <= k_step / 2 * slack).all()
    values = (v.float() - x.vbar.unsqueeze(2)) / x.v_scale.unsqueeze(2)
    relative, smallest = V_ROUNDING[element]
    error = (x.v_levels.float() - values).abs()
    assert (error <= values.abs() * relative * slack + smallest).all()
    # The whole range is used.
    assert (x.q_levels.abs().amax(-1) == 127).all()
    assert (x.v_levels.float().abs().amax(2) == 448).all()
    blocks = torch.nn.functional.pad(x.k_levels, (0, 0, 0, -129 % 64)).unflatten(2, (-1, 64))
    assert (blocks.abs().amax((-1, -2)) == 127).all()
    scaled = quantize_qkv(q, k, v, element=element, v_scale=2 * x.v_scale, vbar=x.vbar)
    assert (scaled.v_levels.float().abs().amax(2) == 224).all()


def test_the_scale_of_tiny_values_has_a_reciprocal(make_qkv):
    """Kernels multiply by it."""
    q, k, v = make_qkv(1, 2, 100, 64, dtype=torch.float32)
    for size in (1e-35, 1e-37, 1e-39):
        x = quantize_qkv(q, k, v * size)
        assert (1 / x.v_scale).isfinite().all()


@pytest.mark.parametrize(
    ("element", "dtype"), [(Element.BF16, torch.bfloat16), (Element.FP16, torch.float16)]
)
def test_sixteen_bit_copies_its_inputs(make_qkv, element: Element, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(1, 2, 129, 64, dtype=dtype)
    x = quantize_qkv(q, k + 5, v, element=element)
    for levels, given in ((x.q_levels, q), (x.k_levels, k + 5), (x.v_levels, v)):
        assert levels.dtype == dtype and torch.equal(levels, given)
    assert all((scale == 1).all() for scale in (x.q_scale, x.k_scale, x.v_scale))
    assert not x.kbar.any() and not x.vbar.any()


def test_the_mean_of_large_numbers_does_not_overflow(make_qkv) -> None:
    """Their sum would."""
    q, k, v = (3e36 * (2 + x.clamp(-1, 1)) for x in make_qkv(1, 1, 200, 64, dtype=torch.float32))
    x = quantize_qkv(q, k, v, element=Element.INT8_E4M3)
    assert not torch.isfinite(k.sum(2)).all()
    torch.testing.assert_close(x.kbar[0, 0].double(), k[0, 0].double().mean(0), rtol=1e-3, atol=0)
    torch.testing.assert_close(x.vbar[0, 0].double(), v[0, 0].double().mean(0), rtol=1e-3, atol=0)


def test_the_mean_key_of_many_tokens_in_an_order_is_that_of_a_sample(make_qkv, monkeypatch):
    q, k, v = make_qkv(3, 2, GRID.tokens, 16)
    cubes, lengths = cube_order(GRID), torch.tensor([334, 259, 300], dtype=torch.int32)
    few = quantize_qkv(q, k, v, cubes, key_lengths=lengths)
    monkeypatch.setattr(key_mean, "LEAST_KEYS", GRID.tokens)
    monkeypatch.setattr(key_mean, "STRIDE", 3)
    sampled = quantize_qkv(q, k, v, cubes, key_lengths=lengths)
    assert torch.equal(sampled.vbar, few.vbar)
    for entry, length in enumerate(lengths.tolist()):
        counted = [*range(64), *range(192, min(256, length))]
        expected = k[entry, :, counted].float().mean(1)
        torch.testing.assert_close(sampled.kbar[entry], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(quantize_qkv(q, k, v, key_lengths=lengths).kbar, few.kbar)


def test_statistics_of_queries_in_an_order_are_of_the_tokens_of_a_block_alone(make_qkv) -> None:
    """Empty slots, which are zeros, do not count."""
    q, k, v = make_qkv(1, 2, GRID.tokens, 16)
    cubes = cube_order(GRID)
    x = quantize_qkv(q, k, v, cubes)
    for block, slots in enumerate(cubes.slot_token.split(128)):
        rows = q[0][:, slots[slots >= 0].long()].float()
        similarity = torch.nn.functional.normalize(rows, dim=-1).mean(1).square().sum(-1)
        torch.testing.assert_close(x.q_block_mean[0, :, block], rows.mean(1))
        torch.testing.assert_close(x.q_self_similarity[0, :, block], similarity)


def test_zero_maxima_give_zero_levels(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 128, 16)
    q[:], k[:], v[..., 0] = 0, 3, 7
    x = quantize_qkv(q, k, v)
    assert float(x.v_scale[0, 0, 0]) == 1
    assert not any(levels.float().any() for levels in (x.q_levels, x.k_levels, x.v_levels[..., 0]))
    for scale in (x.q_scale, x.k_scale):
        assert (scale > 0).all() and scale.max() < 1e-6, "no logit is as large as a level"
