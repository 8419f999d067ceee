# SPDX-License-Identifier: Apache-2.0
"""Operands and block statistics in a token order, against loops over the tokens of each block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparge.errors import Unsupported
from sparge.kernels.spec import Element
from sparge.order.grid import TokenGrid, TokenOrder, cube_order, raster_order
from sparge.reference import quantize_qkv
from sparge.reference.packed import gather, pack_qkv, scatter
from sparge.stages import key_mean
from tests.reference.blocks import blocks_of

GRID = TokenGrid(3, 7, 9, prefix=70, suffix=75)  # 70 + 189 + 75 tokens: every segment is ragged
LENGTHS = torch.tensor([334, 259, 300], dtype=torch.int32)
OPERANDS = ("q_levels", "k_levels", "v_levels", "q_scale", "k_scale", "v_scale", "kbar", "vbar")
STATISTICS = ("q_block_mean", "k_block_mean", "q_self_similarity", "k_self_similarity")


@pytest.mark.parametrize("element", list(Element))
@pytest.mark.parametrize("tokens", [64, 321])
def test_raster_order_changes_nothing(make_qkv, element: Element, tokens: int) -> None:
    q, k, v = make_qkv(2, 4, tokens, 16, kv_heads=2)
    plain = quantize_qkv(q, k, v, element=element)
    packed = pack_qkv(q, k, v, raster_order(tokens), element=element).operands
    for name in OPERANDS:
        value, expected = getattr(packed, name), getattr(plain, name)
        if name[2:] in ("levels",) or name == "q_scale":
            assert not value[:, :, tokens:].float().any() or name == "q_scale"
            value = value[:, :, :tokens]
        assert torch.equal(value.float(), expected.float()), name
    for name in STATISTICS:
        assert torch.allclose(getattr(packed, name), getattr(plain, name), atol=1e-6), name
    assert torch.equal(packed.key_counts, plain.key_counts)


@pytest.mark.parametrize("order", [None, cube_order(GRID)], ids=["as they come", "cubes"])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "lengths"])
def test_statistics_are_those_of_the_tokens_in_a_block(
    make_qkv, order: TokenOrder | None, lengths: torch.Tensor | None
) -> None:
    q, k, v = make_qkv(3, 4, GRID.tokens, 16, kv_heads=2)
    k = k + 3
    if lengths is not None:
        for b, length in enumerate(lengths.tolist()):
            k[b, :, length:] = v[b, :, length:] = torch.nan
    packed = pack_qkv(q, k, v, order, key_lengths=lengths)
    x = packed.operands
    for b in range(3):
        length = GRID.tokens if lengths is None else int(lengths[b])
        for j, block in enumerate(blocks_of(order, GRID.tokens, 64)):
            tokens = [token for token in block if token < length]
            assert int(x.key_counts[b, j]) == len(tokens)
            if not tokens:
                for value in (packed.k_variance, packed.v_block_mean, packed.v_variance):
                    assert not value[b, :, j].any()
                continue
            keys, values = k[b][:, tokens].double(), v[b][:, tokens].double()
            near: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
            mean = keys.mean(1) - x.kbar[b].double()
            assert torch.allclose(x.k_block_mean[b, :, j].double(), mean, **near)
            variance = keys.var(1, correction=0)
            assert torch.allclose(packed.k_variance[b, :, j].double(), variance, **near)
            mean = values.mean(1) - x.vbar[b].double()
            assert torch.allclose(packed.v_block_mean[b, :, j].double(), mean, **near)
            spread = values.var(1, correction=0).sum(-1)
            assert torch.allclose(packed.v_variance[b, :, j].double(), spread, **near)
            similarity = torch.nn.functional.normalize(keys - x.kbar[b].double()[:, None], dim=-1)
            similarity = similarity.mean(1).square().sum(-1)
            assert torch.allclose(x.k_self_similarity[b, :, j].double(), similarity, **near)
        for i, rows in enumerate(blocks_of(order, GRID.tokens, 128)):
            queries = q[b][:, rows].double()
            assert int(packed.query_counts[i]) == len(rows)
            mean = x.q_block_mean[b, :, i].double()
            assert torch.allclose(mean, queries.mean(1), atol=1e-5)
            similarity = torch.nn.functional.normalize(queries, dim=-1).mean(1).square().sum(-1)
            assert torch.allclose(x.q_self_similarity[b, :, i].double(), similarity, atol=1e-5)


def test_the_mean_key_of_many_tokens_is_that_of_a_sample(
    make_qkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = make_qkv(3, 2, GRID.tokens, 16)
    few = pack_qkv(q, k, v, cube_order(GRID), key_lengths=LENGTHS).operands
    assert torch.equal(few.kbar, quantize_qkv(q, k, v, key_lengths=LENGTHS).kbar)
    monkeypatch.setattr(key_mean, "LEAST_KEYS", GRID.tokens)
    monkeypatch.setattr(key_mean, "STRIDE", 3)
    packed = pack_qkv(q, k, v, cube_order(GRID), key_lengths=LENGTHS).operands
    assert torch.equal(packed.vbar, few.vbar)
    for entry, length in enumerate(LENGTHS.tolist()):
        counted = [*range(64), *range(192, min(256, length))]
        expected = k[entry, :, counted].float().mean(1)
        torch.testing.assert_close(packed.kbar[entry], expected, rtol=1e-5, atol=1e-6)
    as_they_come = pack_qkv(q, k, v, key_lengths=LENGTHS).operands
    assert torch.equal(as_they_come.kbar, few.kbar)


def test_gather_and_scatter_are_inverse(make_qkv) -> None:
    order = cube_order(GRID)
    q, _, _ = make_qkv(2, 3, GRID.tokens, 8)
    packed = gather(q, order)
    assert packed.shape == (2, 3, order.slots, 8)
    assert torch.equal(scatter(packed, order), q)
    assert not packed[:, :, order.slot_token < 0].any()
    q, k, v = make_qkv(1, 1, 100, 8)
    with pytest.raises(Unsupported, match=f"one of {GRID.tokens} tokens"):
        pack_qkv(q, k, v, order)


@pytest.mark.parametrize("suffix", [0, 9])
def test_key_lengths_may_not_cut_the_grid(make_qkv, suffix: int) -> None:
    grid = TokenGrid(2, 5, 9, prefix=3, suffix=suffix)
    q, k, v = make_qkv(1, 1, grid.tokens, 8)
    pack_qkv(q, k, v, cube_order(grid), key_lengths=torch.tensor([93]))
    with pytest.raises(ValueError, match="give at least 93"):
        pack_qkv(q, k, v, cube_order(grid), key_lengths=torch.tensor([92]))
