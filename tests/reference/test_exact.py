# SPDX-License-Identifier: Apache-2.0
"""exact_attention against torch's own attention and the float64 oracle; the reference beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.inputs import draw
from benchmarks.metrics import rel_l1
from benchmarks.shapes import Shape
from sparge.head_settings import HeadSettings, Router
from sparge.kernels.spec import Element
from sparge.order.grid import TokenGrid, cube_order
from sparge.policy import SparsePolicy
from sparge.reference import attend, attention, exact_attention, quantize_qkv, route
from tests.fuzz.draw import Case
from tests.fuzz.oracle import Setting, answer

GRID = TokenGrid(3, 8, 11, prefix=20, suffix=45)
CUBES = cube_order(GRID)
CUT = torch.tensor([GRID.tokens, GRID.tokens - 45], dtype=torch.int32)
ERROR, MASS = int(Router.ERROR), int(Router.MASS)
SETTINGS = HeadSettings(
    torch.tensor([0.3, 0.1, 0.2, 0.0]),
    torch.tensor([1.0, 0.0, 0.4, 2.5]),
    torch.tensor([MASS, MASS, ERROR, ERROR], dtype=torch.int32),
)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 129, 799])
def test_dense_is_torchs_attention(make_qkv, tokens: int, is_causal: bool) -> None:
    q, k, v = make_qkv(2, 4, tokens, 32, kv_heads=2, dtype=torch.float64)
    out, _ = exact_attention(q, k, v, is_causal=is_causal, dtype=torch.float64)
    truth = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    assert (out - truth).abs().max() < 1e-12


def test_an_empty_row_is_zero_keys_beyond_the_length_are_never_read_and_nan_shows(make_qkv) -> None:
    q, k, v = make_qkv(2, 1, 70, 16, dtype=torch.float32)
    k[0] = v[0] = k[1, :, 30:] = v[1, :, 30:] = torch.nan
    out, lse = exact_attention(q, k, v, key_lengths=torch.tensor([0, 30], dtype=torch.int32))
    assert not out[0].any() and (lse[0] == -torch.inf).all()
    alone, _ = exact_attention(q[1:], k[1:, :, :30], v[1:, :, :30])
    assert torch.equal(out[1:], alone)
    q[0, 0, 3] = torch.nan
    out, _ = exact_attention(q[:1], q[1:], q[1:], torch.ones(1, 1, 1, 2, dtype=torch.bool))
    assert out[0, 0, 3].isnan().all() and not out[0, 0, 4:].isnan().any()


@pytest.mark.parametrize(
    ("order", "is_causal"),
    [(None, False), (None, True), (CUBES, False)],
    ids=["as they come", "causal", "cubes"],
)
@pytest.mark.parametrize("lengths", [None, CUT], ids=["whole", "cut"])
def test_pooled_keys_and_output_scale_are_the_oracles(make_qkv, order, is_causal, lengths) -> None:
    q, k, v = make_qkv(2, 4, GRID.tokens, 16, kv_heads=2)
    k, v = k + 1, v + 2 * k
    x = quantize_qkv(q, k, v, order, key_lengths=lengths)
    routed = route(x, SparsePolicy(), SETTINGS, scale=0.25, is_causal=is_causal)
    assert routed.pooled[:, [0, 2, 3]].any((-2, -1)).all(), "the case should pool something"
    options: dict[str, Any] = {"scale": 0.25, "is_causal": is_causal, "key_lengths": lengths}
    options["order"] = order
    output_scale = torch.ones(4) if is_causal else torch.tensor([1.5, 1.0, 0.5, 1.1])
    named = options | {"head_settings": replace(SETTINGS, output_scale=output_scale)}
    call = Case(0, "", "", q, k, v, SparsePolicy(), "HND", named)
    expected = answer(Setting.of(call), routed.kept)
    out, lse = exact_attention(
        q, k, v, routed.kept, routed.pooled, SETTINGS.pool_weight,
        output_scale=output_scale, dtype=torch.float64, **options,
    )  # fmt: skip
    torch.testing.assert_close(out, expected.out, atol=1e-10, rtol=0)
    torch.testing.assert_close(lse, expected.lse)


@pytest.mark.parametrize("element", Element)
def test_many_blocks_are_pooled_in_tiles_of_64_one_of_them_empty(make_qkv, element) -> None:
    """Random calls of tests/fuzz have fewer blocks."""
    q, k, v = make_qkv(1, 4, 100, 16, kv_heads=2, kv_tokens=135 * 64 + 20)
    k = 2 * k[:, :, ::64].repeat_interleave(64, 2)[:, :, : k.shape[2]] + k / 2
    blocks = torch.arange(136)
    kept = (blocks % 3 == 0).expand(1, 4, 1, 136)
    pooled = ~kept & (blocks // 64 != 1) & (SETTINGS.pool_weight > 0)[:, None, None]
    given = (kept, pooled, SETTINGS.pool_weight)
    found = attend(quantize_qkv(q, k, v, element=element), *given, scale=0.25)
    out, lse = exact_attention(q, k, v, *given, scale=0.25)
    limits = {Element.INT8_E4M3: 0.04, Element.INT8_INT8: 0.02}
    assert rel_l1(found.out, out) < limits.get(element, 0.015)
    assert (found.lse - lse).abs().max() < 0.1


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
    qkv = draw(Shape("small", 6, 1566, 64, TokenGrid(4, 16, 24, suffix=30)), "cpu")
    result, routed = attention(*qkv, SparsePolicy(topk=1.0), element=element)
    assert routed.density() == 1.0
    exact, _ = exact_attention(*qkv)
    for head in range(6):
        assert rel_l1(result.out[:, head], exact[:, head]) <= limit, head


@pytest.mark.parametrize("element", [e for e in Element if e.quantized])
def test_equal_values_come_back_exactly(make_qkv, element: Element) -> None:
    q, k, v = make_qkv(1, 1, 300, 64)
    v[:] = v[:, :, :1]
    result, _ = attention(q, k, v, SparsePolicy(topk=0.3), element=element)
    assert torch.equal(result.out.bfloat16(), v)
