# SPDX-License-Identifier: Apache-2.0
"""Types of 16-bit products where q, k and v differ: fp16 holds nothing beyond 65,504, bf16 does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparge
from sparge import Precision, SparsePolicy
from sparge.call import make_call

attention: Any = sparge.attention
POLICY = SparsePolicy(topk=1.0, precision=Precision.SIXTEEN_BIT)


@pytest.mark.parametrize(("large", "dtype"), [("q", torch.bfloat16), ("v", torch.float32)])
def test_bf16_where_not_all_are_fp16(make_qkv, large: str, dtype: torch.dtype) -> None:
    given = dict(zip("qkv", make_qkv(1, 2, 160, 64, dtype=torch.float16), strict=True))
    given[large] = given[large].to(dtype) * 1e6
    if large == "q":
        given["k"] = given["k"] * 1e-5
    out = attention(*given.values(), POLICY, output_dtype=torch.float32)
    assert out.isfinite().all()
    rounded = (x.bfloat16() for x in given.values())
    assert torch.equal(out, attention(*rounded, POLICY, output_dtype=torch.float32))


@pytest.mark.parametrize("mixed", [None, 0, 1, 2])
def test_kernels_are_told_likewise(make_qkv, mixed: int | None) -> None:
    given = list(make_qkv(dtype=torch.float16))
    if mixed is not None:
        given[mixed] = given[mixed].bfloat16()
    call = make_call(*given, POLICY, "HND", False, None, None, None, None)
    expected = "FP16" if mixed is None else "BF16"
    assert call.element.name == call.heads(0, 1).element.name == expected
