# SPDX-License-Identifier: Apache-2.0
"""Types of 16-bit products where q, k and v differ: fp16 holds nothing beyond 65,504, bf16 does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparge
from sparge import Precision, SparsePolicy, TokenGrid, cube_order, reference
from sparge.call import make_call
from sparge.common.metrics import rel_l2

attention: Any = sparge.attention
POLICY = SparsePolicy(topk=1.0, precision=Precision.SIXTEEN_BIT)


@pytest.mark.parametrize(
    ("large", "dtype", "ordered"),
    [("q", torch.bfloat16, False), ("k", torch.float32, True), ("v", torch.bfloat16, True)],
)
def test_bf16_where_not_all_are_fp16(make_qkv, large: str, dtype: Any, ordered: bool) -> None:
    given = dict(zip("qkv", make_qkv(1, 2, 160, 64, dtype=torch.float16), strict=True))
    given[large] = given[large].to(dtype) * 1e6
    if large != "v":
        other = "k" if large == "q" else "q"
        given[other] = given[other] * 1e-5
    order = cube_order(TokenGrid(2, 8, 10)) if ordered else None
    named = {"order": order, "output_dtype": torch.float32}
    out = attention(*given.values(), POLICY, **named)
    assert out.isfinite().all()
    assert torch.equal(out, attention(*(x.bfloat16() for x in given.values()), POLICY, **named))


def test_fp16_where_all_are(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 200, 64, dtype=torch.float16)
    out = attention(q, k, v, POLICY)
    truth, _ = reference.exact_attention(q, k, v)
    in_bf16 = attention(q.bfloat16(), k, v, POLICY, output_dtype=torch.float16)
    assert rel_l2(out, truth) < rel_l2(in_bf16, truth) / 4


@pytest.mark.parametrize(
    ("mixed", "element"), [(None, "FP16"), (0, "BF16"), (1, "BF16"), (2, "BF16")]
)
def test_kernels_are_told_likewise(make_qkv, mixed: int | None, element: str) -> None:
    q, k, v = (
        x.bfloat16() if place == mixed else x
        for place, x in enumerate(make_qkv(dtype=torch.float16))
    )
    call = make_call(q, k, v, POLICY, "HND", False, None, None, None, None)
    assert call.element.name == call.heads(0, 1).element.name == element
