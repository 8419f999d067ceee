# SPDX-License-Identifier: Apache-2.0
"""The pooled residual against its definition, exactly and in the kernels' arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparge.blocks import BlockPlan
from sparge.head_settings import HeadBudget, Router
from sparge.kernels.spec import Element
from sparge.order.grid import TokenGrid, TokenOrder, cube_order
from sparge.policy import SparsePolicy
from sparge.reference import attend, quantize_qkv
from sparge.reference.attend import (
    HOPPER_SOFTMAX,
    HOPPER_SOFTMAX_16,
    PORTABLE_SOFTMAX,
    OnlineSoftmax,
)
from sparge.reference.choose import Choice, choose_blocks
from sparge.reference.exact_pooled import exact_pooled_attention
from sparge.reference.fixed_exp2 import HIGH, LOW
from sparge.reference.packed import Packed, pack_qkv, scatter
from sparge.reference.pooled import attend_packed
from tests.reference.dense import dense_pooled

GRID = TokenGrid(3, 8, 11, prefix=20, suffix=45)
CUBES = cube_order(GRID)
LENGTHS = torch.tensor([GRID.tokens, GRID.tokens - 45], dtype=torch.int32)
ERROR, MASS = int(Router.ERROR), int(Router.MASS)
BUDGET = HeadBudget(
    torch.tensor([0.3, 0.1, 0.2, 0.0]),
    torch.tensor([1.0, 0.0, 0.4, 2.5]),
    torch.tensor([MASS, MASS, ERROR, ERROR], dtype=torch.int32),
)
# Relative half unit in the last place of P, and half its smallest step (of P's own range).
P_ROUNDING = {
    Element.INT8_FP16: (2.0**-11, 2.0**-25),
    Element.INT8_E4M3: (2.0**-4, 2.0**-10 / 448),
    Element.BF16: (2.0**-8, 0.0),
    Element.FP16: (2.0**-11, 2.0**-25),
}
CASES = {
    "as they come": (None, False, None),
    "causal": (None, True, None),
    "cut": (None, False, LENGTHS),
    "causal and cut": (None, True, LENGTHS),
    "cubes": (CUBES, False, None),
    "cubes and cut": (CUBES, False, LENGTHS),
}
Case = tuple[TokenOrder | None, bool, torch.Tensor | None]
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_case(make_qkv, case: Case, element: Element) -> tuple[QKV, Packed, Choice]:
    order, is_causal, lengths = case
    dtype = torch.float16 if element == Element.FP16 else torch.bfloat16
    q, k, v = make_qkv(2, 4, GRID.tokens, 16, kv_heads=2, dtype=dtype)
    k, v = k + 1, v + 2 * k
    packed = pack_qkv(q, k, v, order, element=element, key_lengths=lengths)
    choice = choose_blocks(packed, SparsePolicy(), BUDGET, scale=0.25, is_causal=is_causal)
    assert choice.pooled[:, [0, 2, 3]].any((-2, -1)).all(), "the case should pool something"
    return (q, k, v), packed, choice


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_exact_residual_is_the_definition(make_qkv, case: Case) -> None:
    order, is_causal, lengths = case
    qkv, _, choice = make_case(make_qkv, case, Element.INT8_FP16)
    expected, expected_lse = dense_pooled(
        *qkv,
        choice.kept,
        choice.pooled,
        BUDGET.gain.tolist(),
        order=order,
        is_causal=is_causal,
        scale=0.25,
        lengths=None if lengths is None else lengths.tolist(),
    )
    out, lse = exact_pooled_attention(
        *qkv,
        choice.kept,
        choice.pooled,
        BUDGET.gain,
        order=order,
        is_causal=is_causal,
        scale=0.25,
        key_lengths=lengths,
        dtype=torch.float64,
    )
    assert torch.allclose(out, expected, atol=1e-10)
    seen = expected_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert torch.allclose(lse[seen], expected_lse[seen])


@pytest.mark.parametrize(
    ("element", "softmax"),
    [
        *((element, PORTABLE_SOFTMAX) for element in Element),
        (Element.INT8_E4M3, HOPPER_SOFTMAX),
        (Element.BF16, HOPPER_SOFTMAX_16),
    ],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_error_is_that_of_rounding_p(
    make_qkv, case: Case, element: Element, softmax: OnlineSoftmax
) -> None:
    """Only the rounding of P is left with the stored operands, pseudo-keys included."""
    is_causal = case[1]
    _, packed, choice = make_case(make_qkv, case, element)
    x = packed.operands
    options: dict[str, Any] = {"scale": 0.25, "is_causal": is_causal, "softmax": softmax}
    result = attend_packed(packed, choice.kept, choice.pooled, BUDGET.gain, **options)
    relative, smallest = P_ROUNDING[element]
    lse_error = 2e-4
    if softmax.fixed_exp2:  # what is rounded is off already
        off = max(-LOW, HIGH)
        relative, smallest = relative + off + relative * off, smallest * (1 + off)
    if softmax.sums_rounded:  # in the sums as in the values: both may err, and err together
        lse_error += math.log1p(relative)
        relative *= 2
    for b in range(2):
        for h in range(4):
            logits, values = stored_logits(packed, choice, b, h, is_causal, BUDGET.gain)
            rows = logits.amax(-1) > -torch.inf
            p = logits.softmax(-1).nan_to_num(0.0)
            spread = p @ values.abs()
            row_sum = result.row_sum[b, h].double().clamp(min=1)
            lost = logits.shape[1] * smallest * values.abs().max() / row_sum
            bound = spread * (relative + 1e-5) + lost.unsqueeze(-1) + 1e-5
            vbar = x.vbar[b, h // 2].double()
            error = (result.out[b, h].double() - vbar - p @ values).abs()
            assert (error <= bound)[rows].all()
            natural = logits.logsumexp(-1) + x.q_dot_kbar[b, h].double() * 0.25
            assert (result.lse[b, h] - natural)[rows].abs().max() < lse_error


def stored_logits(
    packed: Packed, choice: Choice, b: int, h: int, is_causal: bool, gain: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Natural logits (Nq, keys + pseudo-keys) of the stored operands, and their values."""
    x = packed.operands
    kv = h // (x.heads // x.kv_heads)
    q = x.q_levels[b, h].double() * x.q_scale[b, h].double().unsqueeze(-1) * 0.25
    k_scale = x.k_scale[b, kv].repeat_interleave(64)[: x.n_keys].double()
    keys = x.k_levels[b, kv].double() * k_scale.unsqueeze(-1)
    v_scale = x.v_scale[b, kv].double()
    values = x.v_levels[b, kv].double() * v_scale
    query, key = torch.arange(x.n_queries), torch.arange(x.n_keys)
    visible = choice.kept[b, h][query // 128][:, key // 64]
    visible = visible & (key % 64 < x.key_counts[b][key // 64])
    if is_causal:
        visible = visible & (key <= query.unsqueeze(-1))

    means = x.k_block_mean[b, kv]
    pooled_values = packed.v_block_mean[b, kv] / x.v_scale[b, kv]
    if x.element in (Element.INT8_FP16, Element.INT8_E4M3):
        largest = means.abs().amax(-1, keepdim=True)
        means = (means * (127 / largest.clamp(min=1e-9))).round().double() * largest / 127
    else:
        means = means.to(x.k_levels.dtype).double()
    pooled_values = pooled_values.to(x.v_levels.dtype).double() * v_scale
    weight = (x.key_counts[b].double() * gain[h]).log()
    pseudo = (q @ means.T + weight).masked_fill(~choice.pooled[b, h][query // 128], -torch.inf)
    logits = torch.cat([(q @ keys.T).masked_fill(~visible, -torch.inf), pseudo], -1)
    if packed.order is not None:
        logits[packed.order.slot_token < 0] = -torch.inf  # no query
    return logits, torch.cat([values, pooled_values])


@pytest.mark.parametrize("element", [Element.INT8_E4M3, Element.BF16])
def test_pseudo_keys_go_on_where_the_kept_blocks_end(make_qkv, element: Element) -> None:
    """A kernel's loop over tiles of pseudo-keys, written out in float64: maximum, rescale, P."""
    q, k, v = make_qkv(1, 1, 100, 16, kv_tokens=135 * 64 + 20)
    k = 2 * k[:, :, ::64].repeat_interleave(64, 2)[:, :, : k.shape[2]] + k / 2
    packed = pack_qkv(q, k, v, element=element)
    blocks = torch.arange(136)
    kept = (blocks % 3 == 0).expand(1, 1, 1, 136)
    dropped = ~kept & (blocks // 64 != 1)
    before = attend_packed(packed, kept, scale=0.25)
    result = attend_packed(packed, kept, dropped, torch.tensor([0.7]), scale=0.25)

    choice = Choice(kept & False, dropped, kept.long(), kept, kept.long())
    logits, values = stored_logits(packed, choice, 0, 0, False, torch.tensor([0.7]))
    logits = logits[:, packed.operands.n_keys :] / math.log(2)
    values = values[packed.operands.n_keys :] / packed.operands.v_scale[0, 0].double()
    peak, stored_as = (448, torch.float8_e4m3fn) if element.name == "INT8_E4M3" else (1, q.dtype)
    m, total = before.row_max[0, 0].double(), before.row_sum[0, 0].double()
    acc = torch.zeros(100, 16, dtype=torch.float64)
    unrounded = acc
    for tile in (slice(0, 64), slice(64, 128), slice(128, 136)):
        grown = torch.maximum(m, logits[:, tile].amax(-1))
        shrink = torch.exp2(m - grown).unsqueeze(-1)
        p = torch.exp2(logits[:, tile] - grown.unsqueeze(-1))
        stored = (p.float() * peak).to(stored_as).double() / peak
        acc = acc * shrink + stored @ values[tile]
        unrounded = unrounded * shrink + p @ values[tile]
        total, m = total * shrink.squeeze(-1) + p.sum(-1), grown
    shrink = torch.exp2(before.row_max[0, 0].double() - m).unsqueeze(-1)
    exact_part = before.unnormalised[0, 0].double() * shrink
    pooled_mass = total.unsqueeze(-1) - before.row_sum[0, 0].double().unsqueeze(-1) * shrink
    vbar = packed.operands.vbar[0, 0].double() * pooled_mass
    found = result.unnormalised[0, 0].double() - exact_part - vbar
    found = found / packed.operands.v_scale[0, 0].double()
    assert (m > before.row_max[0, 0].double() + 1).any(), "some maxima should grow"
    assert torch.allclose(result.row_max[0, 0].double(), m, atol=1e-4)
    assert torch.allclose(result.row_sum[0, 0].double(), total, rtol=1e-4)
    # A few P straddle a midpoint between float32 and float64 and round the other way.
    assert (found - acc).norm() < 0.3 * (unrounded - acc).norm()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_quantization_is_all_that_parts_kernels_from_the_definition(make_qkv, case: Case) -> None:
    order, is_causal, lengths = case
    qkv, packed, choice = make_case(make_qkv, case, Element.FP16)
    options: dict[str, Any] = {"scale": 0.25, "is_causal": is_causal}
    result = attend_packed(packed, choice.kept, choice.pooled, BUDGET.gain, **options)
    out = result.out if order is None else scatter(result.out, order)
    exact, _ = exact_pooled_attention(
        *qkv, choice.kept, choice.pooled, BUDGET.gain, order=order, key_lengths=lengths, **options
    )
    # fp16 rounds P, the pseudo-keys and their values by 2^-11 each.
    assert (out - exact).norm() < 3 * 2.0**-11 * exact.norm()


@pytest.mark.parametrize("pvthreshd", [50.0, 3.0])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("element", list(Element))
def test_gain_zero_is_the_plain_drop(
    make_qkv, element: Element, is_causal: bool, pvthreshd: float
) -> None:
    q, k, v = make_qkv(2, 4, 300, 16, kv_heads=2, kv_tokens=500, dtype=torch.float16)
    lengths = torch.tensor([500, 290], dtype=torch.int32)
    # Keys that grow and shrink along q's mean: some blocks lie far below the maximum before them.
    q, k = q + 1, k + 2 * torch.linspace(-1, 8, 500).sin().unsqueeze(-1).half()
    plain = quantize_qkv(q, k, v, element=element, key_lengths=lengths)
    packed = pack_qkv(q, k, v, element=element, key_lengths=lengths)
    budget = HeadBudget.uniform(4, 0.6)
    choice = choose_blocks(packed, SparsePolicy(), budget, scale=0.25, is_causal=is_causal)
    assert not choice.pooled.any()
    plan = BlockPlan.from_kept(choice.kept, 300, 500, is_causal, lengths)
    expected = attend(plain, plan, scale=0.25, pvthreshd=pvthreshd)
    options: dict[str, Any] = {"scale": 0.25, "is_causal": is_causal, "pvthreshd": pvthreshd}
    for pooled in (None, choice.pooled):
        result = attend_packed(packed, choice.kept, pooled, budget.gain, **options)
        for name in vars(expected):
            assert torch.equal(getattr(result, name), getattr(expected, name)), name
    if pvthreshd < 50:
        assert expected.pv_skipped.sum() > 0


def test_the_filter_leaves_pseudo_keys_alone(make_qkv) -> None:
    """Blocks far below the maximum are skipped; pooled, the same blocks still count."""
    q, k, v = make_qkv(1, 1, 128, 16, kv_tokens=256)
    q = q.abs() + 1
    k = torch.zeros_like(k)
    k[:, :, :64] = 4
    packed = pack_qkv(q, k, v, smooth_k=False)
    kept = torch.tensor([True, False, False, False]).expand(1, 1, 1, 4)
    options: dict[str, Any] = {"scale": 0.1, "pvthreshd": 3.0}
    alone = attend_packed(packed, kept, **options)
    skipped = attend_packed(packed, torch.ones_like(kept), **options)
    assert int(skipped.pv_skipped) == 128 * 192
    assert torch.equal(skipped.row_sum, alone.row_sum)
    pooled = attend_packed(packed, kept, ~kept, **options)
    weight = torch.exp2(alone.row_max.double()) * alone.row_sum + 192
    assert torch.allclose(torch.exp2(pooled.row_max.double()) * pooled.row_sum, weight)
    assert (weight > 1.0001 * torch.exp2(alone.row_max.double()) * alone.row_sum).any()


def test_empty_slots_have_no_say_in_the_filter(make_qkv) -> None:
    """A block is skipped for the rows that are there, whatever stands in the rest of their 64."""
    grid = TokenGrid(1, 8, 8, prefix=10)
    q, k, v = make_qkv(1, 1, grid.tokens, 16)
    q = q.abs() + 1
    k = torch.zeros_like(k)
    k[:, :, :10] = 4  # the text block, which comes first
    packed = pack_qkv(q, k, v, cube_order(grid), smooth_k=False)
    kept = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    result = attend_packed(packed, kept, scale=0.1, pvthreshd=3.0)
    assert int(result.pv_skipped) == grid.tokens * 64


@pytest.mark.parametrize("element", [Element.INT8_FP16, Element.INT8_E4M3])
def test_equal_keys_and_values_lose_nothing_by_pooling(make_qkv, element: Element) -> None:
    """Blocks of one key and one value each: their pseudo-key is what they are."""
    q, k, v = make_qkv(1, 2, 500, 16)
    k, v = (x[:, :, ::64].repeat_interleave(64, 2)[:, :, :500] for x in (k, v))
    packed = pack_qkv(q, k, v, element=element)
    dense = torch.ones(1, 2, 4, 8, dtype=torch.bool)
    full = attend_packed(packed, dense, scale=0.25)
    pooled = attend_packed(packed, ~dense, dense, scale=0.25)
    size = (full.out - packed.operands.vbar.unsqueeze(2)).norm()
    # A tile of P rounds in a pattern of its own, 64 equal ones in another.
    rounding = 2 * P_ROUNDING[element][0]
    assert (pooled.out - full.out).norm() <= rounding * size
    assert torch.allclose(pooled.lse, full.lse, atol=1e-4)


def test_gqa_is_repeating_the_heads(make_qkv) -> None:
    q, k, v = make_qkv(1, 4, GRID.tokens, 16, kv_heads=2)
    both: list[tuple[Choice, torch.Tensor]] = []
    for group in (1, 2):
        keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
        packed = pack_qkv(q, keys, values, CUBES)
        choice = choose_blocks(packed, SparsePolicy(), BUDGET, scale=0.25)
        result = attend_packed(packed, choice.kept, choice.pooled, BUDGET.gain, scale=0.25)
        both.append((choice, result.out))
    assert torch.equal(both[0][0].kept, both[1][0].kept)
    assert torch.equal(both[0][0].pooled, both[1][0].pooled)
    assert torch.equal(both[0][1], both[1][1])


def test_an_empty_tile_of_pseudo_keys_changes_nothing(make_qkv) -> None:
    """There are more than 64 blocks: a tile whose blocks are all kept, then one that is pooled."""
    q, k, v = make_qkv(1, 1, 100, 16, kv_tokens=70 * 64 + 5)
    packed = pack_qkv(q, k, v, element=Element.FP16)
    kept = (torch.arange(71) < 64).expand(1, 1, 1, 71)
    options: dict[str, Any] = {"scale": 0.25, "dtype": torch.float64}
    result = attend_packed(packed, kept, ~kept, scale=0.25)
    exact, _ = exact_pooled_attention(q.half(), k.half(), v.half(), kept, ~kept, **options)
    assert (result.out - exact).norm() < 3 * 2.0**-11 * exact.norm()
    moved = replace(packed, v_block_mean=packed.v_block_mean + 1)
    other = attend_packed(moved, kept, ~kept, scale=0.25)
    assert (other.out - result.out).abs().min() > 0
