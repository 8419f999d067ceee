# SPDX-License-Identifier: Apache-2.0
"""The emulated kernel arithmetic against a kernel's own loop, written out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sparge.kernels.spec import Element
from sparge.policy import SparsePolicy
from sparge.reference import Quantized, attend, quantize_qkv, route

STORED = {
    Element.INT8_FP16: torch.float16,
    Element.INT8_E4M3: torch.float8_e4m3fn,
    Element.BF16: torch.bfloat16,
    Element.FP16: torch.float16,
}
SCALE = 0.1
LOGIT_SLACK = 1e-4  # log2 units: float32 dot products of up to 300, times the scale


@dataclass(frozen=True)
class Walked:
    unnormalised: torch.Tensor  # (R, D)
    unrounded: torch.Tensor  # the same, had P not been rounded
    row_max: torch.Tensor  # (R,)
    row_sum: torch.Tensor  # (R,)
    skipped: int


def walk(
    x: Quantized, kept: torch.Tensor, is_causal: bool, b: int, h: int, rows: range, threshold: float
) -> Walked:
    """Online softmax over one PV group of query rows: a block at a time, rescaling, in float64."""
    kv, keys = h // (x.heads // x.kv_heads), int(x.key_counts[b].sum())
    peak = 448.0 if x.element == Element.INT8_E4M3 else 1.0
    q = x.q_levels[b, h, rows.start : rows.stop].double()
    factor = x.q_scale[b, h, rows.start : rows.stop].double() * SCALE * math.log2(math.e)
    m = torch.full((len(rows),), -math.inf, dtype=torch.float64)
    total, acc = torch.zeros_like(m), torch.zeros(2, len(rows), x.head_dim, dtype=torch.float64)
    skipped = 0
    blocks = kept[b, h, rows.start // 128].nonzero().flatten().tolist()
    for place, j in enumerate(blocks):
        span = range(64 * j, min(64 * j + 64, keys))
        s = q @ x.k_levels[b, kv, span.start : span.stop].double().T
        s = s * factor[:, None] * x.k_scale[b, kv, j].double()
        if is_causal:
            for r, row in enumerate(rows):
                s[r, max(0, row + 1 - span.start) :] = -math.inf
        block_max = s.amax(-1)
        if place > 0 and threshold < 50:
            votes = [
                new == -math.inf if old == -math.inf else new - old < -threshold
                for old, new in zip(m.tolist(), block_max.tolist(), strict=True)
            ]
            if all(votes):
                skipped += int((s > -math.inf).sum())
                continue
        grown = torch.maximum(m, block_max)
        reference = torch.where(grown == -math.inf, 0.0, grown)
        shrink = torch.exp2(m - reference)
        p = torch.exp2(s - reference[:, None])
        stored = (p.float() * peak).to(STORED[x.element]).double() / peak
        v = x.v_levels[b, kv, span.start : span.stop].double()
        total = total * shrink + p.sum(-1)
        acc = acc * shrink[:, None] + torch.stack([stored, p]) @ v
        m = grown
    values = acc * x.v_scale[b, kv].double() + total[:, None] * x.vbar[b, kv].double()
    return Walked(values[0], values[1], m, total, skipped)


def peaked_case(make_qkv, element: Element) -> Quantized:
    """Ragged, GQA, logits that span tens of log2 units: maxima grow and blocks can be skipped."""
    q, k, v = make_qkv(2, 2, 330, 32, kv_heads=1, kv_tokens=500, dtype=torch.float16)
    wave = 2 * torch.linspace(-1, 8, 500).sin().unsqueeze(-1)
    lengths = torch.tensor([500, 290], dtype=torch.int32)
    return quantize_qkv(q + 1, k + wave.half(), v, element=element, key_lengths=lengths)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("threshold", [50.0, 15.0, 3.0, 0.0])
@pytest.mark.parametrize("element", list(Element))
def test_is_the_online_softmax_of_a_kernel(
    make_qkv, generator, element: Element, threshold: float, is_causal: bool
) -> None:
    x = peaked_case(make_qkv, element)
    mask = torch.rand(2, 2, 3, 8, generator=generator) < 0.7
    mask[0, 0, 1] = False
    kept = route(x, SparsePolicy(), scale=SCALE, is_causal=is_causal, block_mask=mask).kept
    thresholds = (threshold, threshold / 2)
    options: dict[str, Any] = {"is_causal": is_causal, "pvthreshd": torch.tensor(thresholds)}
    result = attend(x, kept, scale=SCALE, **options)
    error, rounding = 0.0, 0.0
    for b in range(2):
        for h in range(2):
            skipped = 0
            for start in range(0, 330, 64):
                rows = range(start, min(start + 64, 330))
                walked = walk(x, kept, is_causal, b, h, rows, thresholds[h])
                at = (b, h, slice(rows.start, rows.stop))
                skipped += walked.skipped
                assert torch.equal(result.row_max[at] == -math.inf, walked.row_max == -math.inf)
                met = walked.row_sum > 0
                off = (result.row_max[at] - walked.row_max)[met].abs()
                assert (off < LOGIT_SLACK).all()
                assert torch.allclose(result.row_sum[at].double(), walked.row_sum, rtol=LOGIT_SLACK)
                error += (result.unnormalised[at] - walked.unnormalised).square().sum()
                rounding += (walked.unrounded - walked.unnormalised).square().sum()
            assert int(result.pv_skipped[b, h]) == skipped
    # A few P straddle a midpoint between float32 and float64 and round the other way.
    assert error < 0.3**2 * rounding
    if threshold == 3.0:
        assert result.pv_skipped.sum() > 0, "the case should hold blocks to skip"
    if threshold == 50.0:
        assert result.pv_skipped[:, 0].sum() == 0
