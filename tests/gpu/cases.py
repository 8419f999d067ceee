# SPDX-License-Identifier: Apache-2.0
"""The shapes and data on which every kernel is judged, each with the reason it is there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    reason: str
    heads: int = 2
    kv_heads: int = 2
    queries: int = 799
    keys: int = 799
    head_dim: int = 128
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    layout: str = "HND"
    causal: bool = False
    key_lengths: tuple[int, ...] | None = None
    data: str = "smooth"

    @property
    def id(self) -> str:
        return self.reason.replace(" ", "-")


CASES = (
    Case("one token", queries=1, keys=1),
    Case("one short block", queries=63, keys=63),
    Case("one key past a block", queries=129, keys=65, head_dim=64),
    Case("two tokens past query blocks", queries=258, keys=258),
    Case("ragged"),
    Case("ragged 64", head_dim=64),
    Case("whole blocks", queries=1024, keys=1024),
    Case("batch and GQA", batch=2, heads=6, kv_heads=2, queries=385, keys=641),
    Case("more keys than queries", queries=100, keys=1500, head_dim=64),
    Case("more queries than keys", queries=1500, keys=100),
    Case("NHD layout", layout="NHD", batch=2, heads=3, kv_heads=3),
    Case("strided slices of a fused tensor", layout="fused", batch=2),
    Case("head_dim 96", head_dim=96),
    Case("head_dim 40", head_dim=40, queries=300, keys=300),
    Case("odd head_dim and strides", head_dim=35, queries=200, keys=200, layout="NHD"),
    Case("fp16", dtype=torch.float16),
    Case("fp32 read as bf16", dtype=torch.float32, head_dim=64),
    Case("causal", causal=True),
    Case("causal 64 GQA", causal=True, head_dim=64, heads=4, kv_heads=2, queries=513, keys=513),
    Case("causal more keys", causal=True, queries=200, keys=640),
    Case("key lengths", batch=3, key_lengths=(0, 70, 799), head_dim=64),
    Case("causal key lengths", batch=2, key_lengths=(5, 500), causal=True),
    Case("K outliers", data="outliers"),
    Case("V near the FP16 limit in bf16", data="huge values"),
    Case("constant V", data="constant values", dtype=torch.float32),
    Case("all rows equal", data="equal rows", queries=300, keys=300),
    Case("keys of one memory", data="equal rows", layout="expanded", queries=300, keys=300),
    Case("zeros", data="zeros", queries=300, keys=300),
    Case("steep softmax", data="steep"),
)

#: One of each: ragged, GQA with a batch, causal, other numbers of keys, strides and key lengths.
SOME = {"one token", "batch and GQA", "causal 64 GQA", "key lengths"}
SOME |= {"more keys than queries", "odd head_dim and strides"}
SOME_CASES = tuple(case for case in CASES if case.reason in SOME)
some_cases = pytest.mark.parametrize("case", SOME_CASES, ids=lambda case: case.id)


def make_qkv(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v on the GPU as (B, H, N, D) views in the case's memory layout."""
    q = _draw(case, case.heads, case.queries, generator)
    k = _draw(case, case.kv_heads, case.keys, generator)
    v = _draw(case, case.kv_heads, case.keys, generator)
    if case.data == "outliers":
        k[..., 3] += 50.0
        k[..., 7] -= 35.0
    elif case.data == "huge values":
        v = v * 30000.0
    elif case.data == "constant values":
        v = torch.full_like(v, 0.7265625)  # exact in bf16
    elif case.data == "equal rows":
        q, k, v = (x[:, :, :1].expand_as(x).clone() for x in (q, k, v))
    elif case.data == "zeros":
        q, k = torch.zeros_like(q), torch.zeros_like(k)
    elif case.data == "steep":
        q = q * 6
    q, k, v = (_lay_out(x.to("cuda", case.dtype), case.layout) for x in (q, k, v))
    if case.layout == "expanded":  # as models expand one token
        k, v = (x[:, :, :1].expand_as(x) for x in (k, v))
    return q, k, v


def lengths_of(case: Case) -> Tensor | None:
    if case.key_lengths is None:
        return None
    return torch.tensor(case.key_lengths, dtype=torch.int32, device="cuda")


def _draw(case: Case, heads: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Tokens drift along the sequence, channels have a mean of their own: blocks differ."""
    shape = (case.batch, heads, tokens, case.head_dim)
    noise = torch.randn(shape, generator=generator)
    knots = torch.randn(*shape[:2], tokens // 48 + 2, case.head_dim, generator=generator)
    drift = torch.nn.functional.interpolate(
        knots.flatten(0, 1).transpose(1, 2), size=tokens, mode="linear", align_corners=True
    )
    drift = drift.transpose(1, 2).unflatten(0, shape[:2])
    channel_mean = torch.randn(1, heads, 1, case.head_dim, generator=generator)
    return 0.6 * noise + drift + channel_mean


def _lay_out(x: Tensor, layout: str) -> Tensor:
    if layout == "NHD":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        # As a model slices q, k, v out of one projection: token stride three times the row.
        batch, heads, tokens, channels = x.shape
        fused = x.new_full((batch, tokens, 3, heads, channels), float("nan"))
        fused[:, :, 1] = x.transpose(1, 2)
        return fused[:, :, 1].transpose(1, 2)
    return x.contiguous()
