# SPDX-License-Identifier: Apache-2.0
"""The contrast against its definition, and in the kernels' arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import sparge
from sparge.errors import Unsupported
from sparge.head_settings import HeadBudget
from sparge.kernels.spec import Element
from sparge.order.grid import TokenGrid, cube_order
from sparge.policy import Precision, SparsePolicy
from sparge.reference.choose import choose_blocks
from sparge.reference.exact_pooled import exact_pooled_attention
from sparge.reference.packed import pack_qkv, scatter
from sparge.reference.pooled import attend_packed

GRID = TokenGrid(3, 8, 11, prefix=20, suffix=45)
CUBES = cube_order(GRID)
CONTRAST = torch.tensor([1.5, 1.0, 0.5, 1.1])


def budget(contrast: torch.Tensor | None = CONTRAST) -> HeadBudget:
    return replace(HeadBudget.uniform(4, 0.3), contrast=contrast)


@pytest.fixture
def qkv(make_qkv) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = make_qkv(2, 4, GRID.tokens, 16, kv_heads=2)
    return q, k + 1, v + 2 * k


@pytest.mark.parametrize("element", [Element.INT8_FP16, Element.INT8_E4M3])
def test_it_is_a_factor_of_the_distance_from_the_mean_value(qkv, element: Element) -> None:
    q, k, v = qkv
    packed = pack_qkv(q, k, v, CUBES, element=element)
    choice = choose_blocks(packed, SparsePolicy(), budget(), scale=0.25)
    options: dict[str, Any] = {"order": CUBES, "scale": 0.25, "dtype": torch.float64}
    plain, _ = exact_pooled_attention(q, k, v, choice.kept, **options)
    exact, _ = exact_pooled_attention(q, k, v, choice.kept, contrast=CONTRAST, **options)
    found, without = (
        attend_packed(packed, choice.kept, contrast=x, scale=0.25) for x in (CONTRAST, 1.0)
    )
    mean = v.double().mean(2, keepdim=True).repeat_interleave(2, 1)
    drops = ~CUBES.queries_exact[CUBES.token_slot.long() // 128].bool()
    assert drops.any() and not drops.all()
    expected = mean + CONTRAST[:, None, None].double() * (plain - mean)
    torch.testing.assert_close(exact[:, :, drops], expected[:, :, drops])
    assert torch.equal(exact[:, :, ~drops], plain[:, :, ~drops])
    assert torch.equal(exact[:, 1], plain[:, 1])

    def off(out: torch.Tensor, truth: torch.Tensor) -> float:
        return float((scatter(out, CUBES) - truth).norm() / truth.norm())

    assert off(found.out, exact) < 1.2 * off(without.out, plain) + 1e-3
    assert torch.equal(found.unnormalised, without.unnormalised), "parts have none"
    assert torch.equal(found.lse, without.lse)


def test_one_changes_no_bit_and_others_every_row_that_drops(qkv) -> None:
    options: dict[str, Any] = {"order": CUBES, "output_dtype": torch.float32}
    plain = sparge.attention(*qkv, budget=budget(None), **options)
    ones = sparge.attention(*qkv, budget=budget(torch.ones(4)), **options)
    found = sparge.attention(*qkv, budget=budget(), **options)
    assert torch.equal(plain, ones)
    assert torch.equal(plain[:, 1], found[:, 1])
    assert torch.equal(plain[:, :, :20], found[:, :, :20]), "text drops nothing"
    dense = CUBES.queries_exact[CUBES.token_slot.long() // 128].bool()
    assert (plain != found).any(-1)[:, [0, 2, 3]][:, :, ~dense].all()


def test_blocks_without_keys_are_not_dropped(make_qkv) -> None:
    q, k, v = make_qkv(2, 4, 640, 16)
    options: dict[str, Any] = {"key_lengths": torch.tensor([640, 192], dtype=torch.int32)}
    plain, found = (
        sparge.attention(q, k, v, budget=budget(x), **options) for x in (None, CONTRAST)
    )
    assert torch.equal(plain[1], found[1]), "keeps all three blocks that hold keys"
    assert not torch.equal(plain[0], found[0])


def test_rows_without_keys_stay_0(make_qkv) -> None:
    q, k, v = make_qkv(2, 4, 300, 16)
    lengths = torch.tensor([300, 0], dtype=torch.int32)
    out = sparge.attention(q, k, v + 1, budget=budget(), key_lengths=lengths)
    assert not out[1].any() and out[0].any()


@pytest.mark.parametrize(
    ("policy", "causal", "reason"),
    [
        (SparsePolicy(), True, "later keys"),
        (SparsePolicy(precision=Precision.SIXTEEN_BIT), False, "16-bit operands"),
    ],
)
def test_where_there_is_none(make_qkv, policy: SparsePolicy, causal: bool, reason: str) -> None:
    q, k, v = make_qkv(1, 4, 300, 16)
    with pytest.raises(Unsupported, match=f"{reason}.*leave contrast out"):
        sparge.attention(q, k, v, policy, is_causal=causal, budget=budget())


def test_it_does_not_need_smooth_k(make_qkv) -> None:
    q, k, v = make_qkv(1, 4, 640, 16)
    policy = SparsePolicy(smooth_k=False)
    assert sparge.attention(q, k, v, policy, budget=budget()).isfinite().all()


def test_one_value_a_head() -> None:
    with pytest.raises(ValueError, match="contrast has shape"):
        budget(torch.ones(3))
    part = budget().heads_slice(slice(1, 3)).contrast
    assert part is not None and part.tolist() == [1.0, 0.5]
