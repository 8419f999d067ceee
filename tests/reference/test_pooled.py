# SPDX-License-Identifier: Apache-2.0
"""Pooled keys, exactly (against the float64 oracle) and in the arithmetic of the kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparge.head_settings import HeadSettings, Router
from sparge.kernels.spec import Element
from sparge.order.grid import TokenGrid, TokenOrder, cube_order
from sparge.policy import SparsePolicy
from sparge.reference import Quantized, Route, attend, exact_attention, quantize_qkv, route
from sparge.reference.arithmetic import (
    HOPPER_SOFTMAX,
    HOPPER_SOFTMAX_16,
    PORTABLE_SOFTMAX,
    OnlineSoftmax,
)
from sparge.reference.fixed_exp2 import HIGH, LOW
from tests.fuzz.draw import Case as Call
from tests.fuzz.oracle import Setting, answer

GRID = TokenGrid(3, 8, 11, prefix=20, suffix=45)
CUBES = cube_order(GRID)
LENGTHS = torch.tensor([GRID.tokens, GRID.tokens - 45], dtype=torch.int32)
ERROR, MASS = int(Router.ERROR), int(Router.MASS)
SETTINGS = HeadSettings(
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
OUTPUT_SCALE = torch.tensor([1.5, 1.0, 0.5, 1.1])
Case = tuple[TokenOrder | None, bool, torch.Tensor | None]
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def make_case(make_qkv, case: Case, element: Element) -> tuple[QKV, Quantized, Route]:
    order, is_causal, lengths = case
    dtype = torch.float16 if element == Element.FP16 else torch.bfloat16
    q, k, v = make_qkv(2, 4, GRID.tokens, 16, kv_heads=2, dtype=dtype)
    k, v = k + 1, v + 2 * k
    x = quantize_qkv(q, k, v, order, element=element, key_lengths=lengths)
    routed = route(x, SparsePolicy(), SETTINGS, scale=0.25, is_causal=is_causal)
    assert routed.pooled[:, [0, 2, 3]].any((-2, -1)).all(), "the case should pool something"
    return (q, k, v), x, routed


@each_case
def test_exact_attention_is_the_oracles(make_qkv, case: Case) -> None:
    order, is_causal, lengths = case
    qkv, _, routed = make_case(make_qkv, case, Element.INT8_FP16)
    output_scale = None if is_causal else OUTPUT_SCALE
    options: dict[str, Any] = {"scale": 0.25, "is_causal": is_causal, "key_lengths": lengths}
    options["order"] = order
    head_settings = replace(SETTINGS, output_scale=output_scale)
    call = Call(0, "", "", *qkv, SparsePolicy(), "HND", {**options, "head_settings": head_settings})
    expected = answer(Setting.of(call), routed.kept)
    factor = 1.0 if output_scale is None else output_scale
    out, lse = exact_attention(
        *qkv, routed.kept, routed.pooled, SETTINGS.pool_weight,
        output_scale=factor, dtype=torch.float64, **options,
    )  # fmt: skip
    torch.testing.assert_close(out, expected.out, atol=1e-10, rtol=0)
    torch.testing.assert_close(lse, expected.lse)


def many_blocks(make_qkv, element: Element) -> tuple[Quantized, Route]:
    """Three tiles of pseudo-keys, one of them empty, after kept blocks."""
    q, k, v = make_qkv(1, 4, 100, 16, kv_heads=2, kv_tokens=135 * 64 + 20)
    k = 2 * k[:, :, ::64].repeat_interleave(64, 2)[:, :, : k.shape[2]] + k / 2
    blocks = torch.arange(136)
    kept = (blocks % 3 == 0).expand(1, 4, 1, 136)
    pooled = ~kept & (blocks // 64 != 1) & (SETTINGS.pool_weight > 0)[:, None, None]
    return quantize_qkv(q, k, v, element=element), Route(kept, pooled, kept.long(), kept.long())


@pytest.mark.parametrize(
    ("element", "softmax"),
    [
        *((element, PORTABLE_SOFTMAX) for element in Element),
        (Element.INT8_E4M3, HOPPER_SOFTMAX),
        (Element.BF16, HOPPER_SOFTMAX_16),
    ],
)
@pytest.mark.parametrize("case", [*CASES.values(), None], ids=[*CASES, "many blocks"])
def test_error_is_that_of_rounding_p(
    make_qkv, case: Case | None, element: Element, softmax: OnlineSoftmax
) -> None:
    """Only the rounding of P is left with the stored operands, pseudo-keys included."""
    is_causal = case is not None and case[1]
    if case is None:
        x, routed = many_blocks(make_qkv, element)
    else:
        _, x, routed = make_case(make_qkv, case, element)
    options: dict[str, Any] = {"scale": 0.25, "is_causal": is_causal, "softmax": softmax}
    result = attend(x, routed.kept, routed.pooled, SETTINGS.pool_weight, **options)
    relative, smallest = P_ROUNDING[element]
    lse_error = 2e-4
    if softmax.fixed_exp2:  # what is rounded is off already
        off = max(-LOW, HIGH)
        relative, smallest = relative + off + relative * off, smallest * (1 + off)
    if softmax.sums_rounded:  # in the sums as in the values: both may err, and err together
        lse_error += math.log1p(relative)
        relative *= 2
    for b in range(x.batch):
        for h in range(4):
            logits, values = stored_logits(x, routed, b, h, is_causal)
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
    x: Quantized, routed: Route, b: int, h: int, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Natural logits (Nq, keys + pseudo-keys) of the stored operands, and their values."""
    kv = h // (x.heads // x.kv_heads)
    q = x.q_levels[b, h].double() * x.q_scale[b, h].double().unsqueeze(-1) * 0.25
    k_scale = x.k_scale[b, kv].repeat_interleave(64)[: x.n_keys].double()
    keys = x.k_levels[b, kv].double() * k_scale.unsqueeze(-1)
    v_scale = x.v_scale[b, kv].double()
    values = x.v_levels[b, kv].double() * v_scale
    query, key = torch.arange(x.n_queries), torch.arange(x.n_keys)
    visible = routed.kept[b, h][query // 128][:, key // 64]
    visible = visible & (key % 64 < x.key_counts[b][key // 64])
    if is_causal:
        visible = visible & (key <= query.unsqueeze(-1))

    means = x.k_block_mean[b, kv]
    pooled_values = x.v_block_mean[b, kv] / x.v_scale[b, kv]
    if x.element in (Element.INT8_FP16, Element.INT8_E4M3):
        largest = means.abs().amax(-1, keepdim=True)
        means = (means * (127 / largest.clamp(min=1e-9))).round().double() * largest / 127
    else:
        means = means.to(x.k_levels.dtype).double()
    pooled_values = pooled_values.to(x.v_levels.dtype).double() * v_scale
    weight = (x.key_counts[b].double() * SETTINGS.pool_weight[h]).log()
    pseudo = (q @ means.T + weight).masked_fill(~routed.pooled[b, h][query // 128], -torch.inf)
    logits = torch.cat([(q @ keys.T).masked_fill(~visible, -torch.inf), pseudo], -1)
    if x.order is not None:
        logits[x.order.slot_token < 0] = -torch.inf  # no query
    return logits, torch.cat([values, pooled_values])
