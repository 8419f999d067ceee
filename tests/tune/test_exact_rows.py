# SPDX-License-Identifier: Apache-2.0
"""Attention of a few rows, in parts of the keys and in one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sparge.tune.exact_rows import attend_in_parts, attend_rows, part_count

SMS = 132


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_are_merged_by_their_sums_of_weights(make_qkv, parts, scale) -> None:
    _, k, v = make_qkv(2, 3, 96, 32, dtype=torch.float32)
    q = 3 * k[:, :, ::5]  # sharp, so that parts weigh very differently
    out = attend_in_parts(q, k, v, scale, parts)
    expected = scaled_dot_product_attention(q, k, v, scale=scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_heads_may_share_keys(make_qkv) -> None:
    q, k, v = make_qkv(2, 6, 96, 32, kv_heads=2)
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attend_rows(q, k, v, None), expected.float())


@pytest.mark.parametrize(
    ("tiles", "keys", "parts"),
    [
        (48, 44_776, 2),  # Mochi: four parts take as long
        (80, 32_760, 3),  # Wan
        (96, 17_776, 1),  # CogVideoX-5B: three quarters of the time are not worth the merging
        (48, 44_777, 1),
        (132, 44_776, 1),
    ],
)
def test_parts_fill_the_gpu(tiles: int, keys: int, parts: int) -> None:
    assert part_count(tiles, keys, SMS) == parts
