# SPDX-License-Identifier: Apache-2.0
"""The background term against its definition, key by key, and in the kernels' arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sparge
from sparge.errors import Unsupported
from sparge.head_settings import HeadBudget
from sparge.kernels.spec import Element
from sparge.order.grid import TokenGrid, TokenOrder, cube_order
from sparge.policy import Precision, SparsePolicy
from sparge.reference.choose import choose_blocks
from sparge.reference.exact_pooled import exact_pooled_attention
from sparge.reference.packed import pack_qkv, scatter
from sparge.reference.pooled import attend_packed
from sparge.thresholds import COLUMNS
from tests.reference.blocks import blocks_of

GRID = TokenGrid(3, 8, 11, prefix=20, suffix=45)
CUBES = cube_order(GRID)
LENGTHS = torch.tensor([GRID.tokens, GRID.tokens - 45], dtype=torch.int32)
BACKGROUND = torch.tensor([0.5, 0.0, 8.0, 100.0])
CASES = {
    "as they come": (None, None),
    "cut": (None, LENGTHS),
    "cubes": (CUBES, None),
    "cubes and cut": (CUBES, LENGTHS),
}
Case = tuple[TokenOrder | None, torch.Tensor | None]
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def budget(background: torch.Tensor | None = BACKGROUND) -> HeadBudget:
    plain = HeadBudget.uniform(4, 0.3)
    return HeadBudget(plain.density, plain.gain, plain.router, background=background)


def make_case(make_qkv, case: Case, element: Element):
    order, lengths = case
    q, k, v = make_qkv(2, 4, GRID.tokens, 16, kv_heads=2)
    k, v = k + 1, v + 2 * k
    packed = pack_qkv(q, k, v, order, element=element, key_lengths=lengths)
    return (q, k, v), packed, choose_blocks(packed, SparsePolicy(), budget(), scale=0.25)


@every_case
def test_it_is_one_mean_key_for_all_that_is_dropped(make_qkv, case: Case) -> None:
    order, lengths = case
    (q, k, v), _, choice = make_case(make_qkv, case, Element.INT8_FP16)
    options: dict[str, Any] = {"order": order, "scale": 0.25, "key_lengths": lengths}
    found, lse = exact_pooled_attention(
        q, k, v, choice.kept, background=BACKGROUND, dtype=torch.float64, **options
    )
    rows_of, keys_of = (blocks_of(order, GRID.tokens, size) for size in (128, 64))
    for b in range(2):
        length = GRID.tokens if lengths is None else int(lengths[b])
        for h in range(4):
            keys, values = k[b, h // 2, :length].double(), v[b, h // 2, :length].double()
            for i, rows in enumerate(rows_of):
                blocks = [[token for token in block if token < length] for block in keys_of]
                kept = [
                    t for j, block in enumerate(blocks) if choice.kept[b, h, i, j] for t in block
                ]
                dropped = sum(
                    64 for j, block in enumerate(blocks) if block and not choice.kept[b, h, i, j]
                )
                scores = (q[b, h, rows].double() @ keys.T * 0.25).exp()
                mass = (
                    BACKGROUND[h] * dropped * (q[b, h, rows].double() @ keys.mean(0) * 0.25).exp()
                )
                total = scores[:, kept].sum(-1) + mass
                expected = scores[:, kept] @ values[kept] + mass[:, None] * values.mean(0)
                assert torch.allclose(found[b, h, rows], expected / total[:, None])
                assert torch.allclose(lse[b, h, rows], total.log())


@every_case
@pytest.mark.parametrize("element", [Element.INT8_FP16, Element.INT8_E4M3])
def test_in_the_arithmetic_of_the_kernels(make_qkv, case: Case, element: Element) -> None:
    """It brings no error of its own: what is left is that of P and the operands."""
    order, lengths = case
    qkv, packed, choice = make_case(make_qkv, case, element)
    options: dict[str, Any] = {"order": order, "scale": 0.25, "key_lengths": lengths}

    def off(background: torch.Tensor | float) -> float:
        found = attend_packed(packed, choice.kept, background=background, scale=0.25)
        out = found.out if order is None else scatter(found.out, order)
        lse = found.lse if order is None else scatter(found.lse, order)
        exact, exact_lse = exact_pooled_attention(
            *qkv,
            choice.kept,
            background=background,
            means=(packed.operands.kbar, packed.operands.vbar),
            **options,
        )
        assert (lse - exact_lse).abs().max() < 0.05
        return float((out - exact).norm() / exact.norm())

    assert off(BACKGROUND) < 1.2 * off(0.0) + 1e-3


def test_what_drops_nothing_stays(make_qkv) -> None:
    q, k, v = make_qkv(1, 4, GRID.tokens, 16)
    options: dict[str, Any] = {"order": CUBES, "output_dtype": torch.float32}
    plain = sparge.attention(q, k, v, budget=budget(None), **options)
    zeros = sparge.attention(q, k, v, budget=budget(torch.zeros(4)), **options)
    found = sparge.attention(q, k, v, budget=budget(), **options)
    assert torch.equal(plain, zeros)
    assert torch.equal(plain[:, 1], found[:, 1])
    dense = CUBES.queries_exact[CUBES.token_slot.long() // 128].bool()
    assert dense[:20].all() and not dense.all()
    assert torch.equal(plain[:, :, dense], found[:, :, dense])
    assert (plain != found).any(-1)[:, [0, 2, 3]][:, :, ~dense].all()


def test_a_large_one_gives_the_mean_value(make_qkv) -> None:
    q, k, v = make_qkv(1, 4, 640, 16)
    out = sparge.attention(
        q, k, v, budget=budget(torch.full((4,), 1e9)), output_dtype=torch.float32
    )
    assert torch.allclose(out, v.float().mean(2, keepdim=True).expand_as(out), atol=1e-3)


def test_it_stays_finite_where_what_is_kept_lies_far_below_the_mean(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 640, 16)
    k = torch.zeros_like(k)
    k[:, :, :64], q = 200.0, q.abs() + 1
    packed = pack_qkv(q, -k, v)
    kept = torch.zeros(1, 1, 5, 10, dtype=torch.bool)
    kept[..., 0] = True
    found = attend_packed(packed, kept, background=1.0, scale=1.0)
    assert (found.row_max < -1000).all()
    assert torch.isfinite(found.lse).all()
    mean = v.float().mean(2, keepdim=True)
    assert torch.allclose(found.out, mean.expand_as(found.out), atol=1e-3)


@pytest.mark.parametrize(
    ("policy", "causal", "reason"),
    [
        (SparsePolicy(), True, "later keys"),
        (SparsePolicy(precision=Precision.SIXTEEN_BIT), False, "16-bit operands"),
        (SparsePolicy(smooth_k=False), False, "smooth_k is False"),
    ],
)
def test_where_there_is_none(make_qkv, policy: SparsePolicy, causal: bool, reason: str) -> None:
    q, k, v = make_qkv(1, 4, 300, 16)
    with pytest.raises(Unsupported, match=f"{reason}.*leave background out"):
        sparge.attention(q, k, v, policy, is_causal=causal, budget=budget())


def test_one_value_a_head() -> None:
    plain = HeadBudget.uniform(4, 0.3)
    with pytest.raises(ValueError, match="background has shape"):
        HeadBudget(plain.density, plain.gain, plain.router, background=torch.zeros(3))
    part = budget().heads_slice(slice(1, 3)).background
    assert part is not None and part.tolist() == [0.0, 8.0]
    table = budget().table(SparsePolicy())
    assert table[:, COLUMNS.index("log2_background")].tolist() == pytest.approx(
        [-1, -math.inf, 3, math.log2(100)]
    )
