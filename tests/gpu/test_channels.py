# SPDX-License-Identifier: Apache-2.0
"""Channels of keys that are larger than the others and fluctuate, which no mean removes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.metrics import rel_l2
from sparge import Precision, SparsePolicy, attention

pytestmark = pytest.mark.gpu

#: How many times as large four channels of K are, and Q as small, and the error that 8-bit logits
#: may add. Without balance and rotation: 0.036, 0.069, 0.138, 0.35.
MOST = {5: 0.015, 10: 0.022, 20: 0.040, 50: 0.09}
CHANNELS = 4


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT8_FP16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("times", MOST)
def test_large_channels_add_little_error(times, head_dim, precision, generator) -> None:
    q, k, v = torch.randn(3, 1, 4, 4096, head_dim, generator=generator).cuda()
    channels = torch.randperm(head_dim, generator=generator)[:CHANNELS]

    def error() -> float:
        rounded = q.bfloat16(), k.bfloat16(), v.bfloat16()
        as_read = [x.double() for x in rounded]
        exact = scaled_dot_product_attention(as_read[0], as_read[1], as_read[2])
        policy = SparsePolicy(topk=1.0, precision=precision)
        return rel_l2(attention(*rounded, policy, output_dtype=torch.float32).double(), exact)

    without = error()
    k[..., channels] *= times
    q[..., channels] /= times
    # Errors of logits come to those of weights and values by their squares.
    assert error() <= (without**2 + MOST[times] ** 2) ** 0.5
