# SPDX-License-Identifier: Apache-2.0
"""Operands as close to the inputs as their formats allow; statistics against loops over tokens."""

from __future__ import annotations

import pytest
import torch

from sparge.kernels.spec import Element
from sparge.order.grid import TokenGrid, TokenOrder, cube_order
from sparge.reference import quantize_qkv
from sparge.stages import key_mean

LENGTHS = [1, 64, 129, 799]
GRID = TokenGrid(3, 7, 9, prefix=70, suffix=75)  # 70 + 189 + 75 tokens: every segment is ragged
CUBES = cube_order(GRID)
CUTS = torch.tensor([334, 259, 300], dtype=torch.int32)
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


@pytest.mark.parametrize("order", [None, CUBES], ids=["as they come", "cubes"])
@pytest.mark.parametrize("lengths", [None, CUTS], ids=["whole", "lengths"])
def test_statistics_are_those_of_the_tokens_in_a_block(
    make_qkv, order: TokenOrder | None, lengths: torch.Tensor | None
) -> None:
    q, k, v = make_qkv(3, 4, GRID.tokens, 16, kv_heads=2)
    k = k + 3
    q[0, 0, 100] = 0  # a row without a direction
    if lengths is not None:
        for b, length in enumerate(lengths.tolist()):
            k[b, :, length:] = v[b, :, length:] = torch.nan
    x = quantize_qkv(q, k, v, order, key_lengths=lengths)

    def same(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.allclose(found.double(), expected, atol=1e-5, rtol=1e-5)

    def similarity(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(rows, dim=-1).mean(1).square().sum(-1)

    for b in range(3):
        length = GRID.tokens if lengths is None else int(lengths[b])
        kbar, vbar = x.kbar[b].double()[:, None], x.vbar[b].double()[:, None]
        for j, block in enumerate(blocks_of(order, 64)):
            tokens = [token for token in block if token < length]
            assert int(x.key_counts[b, j]) == len(tokens)
            if not tokens:
                for value in (x.k_block_mean, x.k_variance, x.v_block_mean, x.v_variance):
                    assert not value[b, :, j].any()
                continue
            keys, values = k[b][:, tokens].double() - kbar, v[b][:, tokens].double() - vbar
            same(x.k_block_mean[b, :, j], keys.mean(1))
            same(x.v_block_mean[b, :, j], values.mean(1))
            same(x.k_variance[b, :, j], keys.var(1, correction=0))
            same(x.v_variance[b, :, j], values.var(1, correction=0).sum(-1))
            same(x.k_self_similarity[b, :, j], similarity(keys))
        for i, rows in enumerate(blocks_of(order, 128)):
            queries = q[b][:, rows].double()
            assert int(x.query_counts[i]) == len(rows)
            same(x.q_block_mean[b, :, i], queries.mean(1))
            same(x.q_self_similarity[b, :, i], similarity(queries))


def blocks_of(order: TokenOrder | None, size: int) -> list[list[int]]:
    """Tokens of each block of `size` slots, in the order's slots or one after another."""
    slots = list(range(GRID.tokens)) if order is None else order.slot_token.tolist()
    starts = range(0, len(slots), size)
    return [[token for token in slots[at : at + size] if token >= 0] for at in starts]


def test_the_mean_key_of_many_tokens_is_that_of_a_sample(
    make_qkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = make_qkv(3, 2, GRID.tokens, 16)
    few = quantize_qkv(q, k, v, CUBES, key_lengths=CUTS)
    assert torch.equal(few.kbar, quantize_qkv(q, k, v, key_lengths=CUTS).kbar)
    monkeypatch.setattr(key_mean, "LEAST_KEYS", GRID.tokens)
    monkeypatch.setattr(key_mean, "STRIDE", 3)
    sampled = quantize_qkv(q, k, v, CUBES, key_lengths=CUTS)
    assert torch.equal(sampled.vbar, few.vbar)
    for entry, length in enumerate(CUTS.tolist()):
        counted = [*range(64), *range(192, min(256, length))]
        expected = k[entry, :, counted].float().mean(1)
        torch.testing.assert_close(sampled.kbar[entry], expected, rtol=1e-5, atol=1e-6)
    as_they_come = quantize_qkv(q, k, v, key_lengths=CUTS)
    assert torch.equal(as_they_come.kbar, few.kbar)


@pytest.mark.parametrize("suffix", [0, 9])
def test_key_lengths_may_not_cut_the_grid(make_qkv, suffix: int) -> None:
    grid = TokenGrid(2, 5, 9, prefix=3, suffix=suffix)
    q, k, v = make_qkv(1, 1, grid.tokens, 8)
    quantize_qkv(q, k, v, cube_order(grid), key_lengths=torch.tensor([93]))
    with pytest.raises(ValueError, match="give at least 93"):
        quantize_qkv(q, k, v, cube_order(grid), key_lengths=torch.tensor([92]))


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
