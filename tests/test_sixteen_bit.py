# SPDX-License-Identifier: Apache-2.0
"""Types of 16-bit products where q, k and v differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from sparge import Precision, SparsePolicy, TokenGrid, cube_order, reference
from sparge.call import Call, make_call
from sparge.common.metrics import rel_l2

attention: Any = sparge.attention
SPARSE = SparsePolicy(topk=0.4)
GRID = TokenGrid(2, 8, 10)


class TestSixteenBit:
    """fp16 holds nothing beyond 65,504, bf16 does."""

    POLICY = SparsePolicy(topk=1.0, precision=Precision.SIXTEEN_BIT)

    @pytest.mark.parametrize("large", ["q", "k", "v"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("ordered", [False, True])
    def test_bf16_where_not_all_are_fp16(
        self, make_qkv, large: str, dtype: torch.dtype, ordered: bool
    ) -> None:
        given = dict(zip("qkv", make_qkv(1, 2, 160, 64, dtype=torch.float16), strict=True))
        given[large] = given[large].to(dtype) * 1e6
        if large == "k":
            given["q"] = given["q"] * 1e-5
        if large == "q":
            given["k"] = given["k"] * 1e-5
        order = cube_order(GRID) if ordered else None
        named = {"order": order, "output_dtype": torch.float32}
        out = attention(given["q"], given["k"], given["v"], self.POLICY, **named)
        rounded = [given[name].bfloat16() for name in "qkv"]
        assert out.isfinite().all()
        assert torch.equal(out, attention(*rounded, self.POLICY, **named))

    def test_fp16_where_all_are(self, make_qkv) -> None:
        q, k, v = make_qkv(1, 2, 200, 64, dtype=torch.float16)
        out = attention(q, k, v, self.POLICY)
        truth, _ = reference.exact_attention(q, k, v)
        in_bf16 = attention(q.bfloat16(), k, v, self.POLICY, output_dtype=torch.float16)
        assert rel_l2(out, truth) < rel_l2(in_bf16, truth) / 4

    def test_kernels_are_told_likewise(self, make_qkv) -> None:
        half = make_qkv(dtype=torch.float16)

        def call_of(qkv: list[Tensor]) -> Call:
            named: tuple[Any, ...] = ("HND", False, None, None, None, None)
            return make_call(qkv[0], qkv[1], qkv[2], self.POLICY, *named)

        assert call_of([*half]).element.name == "FP16"
        for place in range(3):
            mixed = [*half]
            mixed[place] = mixed[place].bfloat16()
            call = call_of(mixed)
            assert call.element.name == "BF16"
            assert call.heads(0, 1).element.name == "BF16"
