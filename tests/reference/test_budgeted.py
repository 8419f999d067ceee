# SPDX-License-Identifier: Apache-2.0
"""All stages in a token order with a budget per head, and the parts that measurement scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparge.common.metrics import rel_l2
from sparge.errors import Unsupported
from sparge.head_settings import HeadSettings
from sparge.kernels.spec import Element
from sparge.order.grid import TokenGrid, cube_order
from sparge.policy import SparsePolicy
from sparge.reference import exact_attention
from sparge.reference.budgeted import bucket_partials, budgeted_attention
from sparge.reference.choose import choose_blocks
from sparge.reference.packed import pack_qkv
from sparge.reference.partial import Partial, combine
from sparge.reference.pooled import attend_packed

GRIDS = [
    TokenGrid(5, 9, 11, prefix=70, suffix=33),
    TokenGrid(13, 6, 9, prefix=26),
    TokenGrid(7, 6, 13, suffix=77, lead_frames=1),
    TokenGrid(1, 20, 27, prefix=77),
    TokenGrid(4, 8, 12),
    TokenGrid(1, 1, 5, suffix=3),
    TokenGrid(4, 6, 9, prefix=26, suffix=33, tail=70),
]
# Relative, of the whole output: P and V in 8 or 16 bits, Q and K in 8 or 16 (design, section 6).
ROUNDING = {
    Element.INT8_FP16: 0.02,
    Element.INT8_E4M3: 0.05,
    Element.BF16: 0.01,
    Element.FP16: 0.001,
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pool_weights", [[0.0, 0.0], [1.0, 0.3], [0.0, 2.0]])
def test_buckets_of_ranks_combine_to_any_candidate(
    make_qkv, pool_weights: list[float], is_causal: bool
) -> None:
    """(A + g R) / (a + g r): what measurement scores is what attention then computes."""
    grid = TokenGrid(5, 9, 13, prefix=10)
    order = None if is_causal else cube_order(grid)
    q, k, v = make_qkv(1, 2, grid.tokens, 16, dtype=torch.float16)
    packed = pack_qkv(q, k, v, order, element=Element.FP16)
    options: dict[str, Any] = {"scale": 0.25, "is_causal": is_causal}
    head_settings = HeadSettings.uniform(2, 0.5)
    choice = choose_blocks(packed, SparsePolicy(), head_settings, **options)
    # Forced blocks first, which every candidate computes exactly; then ranks, two to a bucket.
    buckets = torch.where(choice.rank < 0, 0, choice.rank // 2 + 1)
    buckets = buckets.masked_fill(~choice.valid, -1)
    count = int(buckets.max()) + 1
    parts = bucket_partials(packed, buckets, count, **options)
    pool_weight = torch.tensor(pool_weights)
    for split in range(1, count + 1):
        exact = [part for part, _ in parts[:split]]
        pooled = [part.weighted(pool_weight[:, None]) for _, part in parts[split:]]
        found = combine([*exact, *pooled]).output()
        kept = choice.valid & (buckets < split)
        dropped = choice.valid & ~kept & (pool_weight > 0)[:, None, None]
        expected = attend_packed(packed, kept, dropped, pool_weight, **options)
        assert rel_l2(found, expected.out) < ROUNDING[Element.FP16]
    whole, _ = exact_attention(q, k, v, scale=0.25, is_causal=is_causal)
    if order is None:
        assert rel_l2(combine(part for part, _ in parts).output(), whole) < ROUNDING[Element.FP16]


def test_parts_without_keys_are_neutral() -> None:
    some = Partial(torch.ones(1, 2, 4), torch.zeros(1, 2), torch.full((1, 2), 2.0))
    none = Partial(torch.zeros(1, 2, 4), torch.full((1, 2), -torch.inf), torch.zeros(1, 2))
    for merged in (some.plus(none), none.plus(some)):
        assert torch.equal(merged.output(), some.output())
        assert torch.equal(merged.row_max, some.row_max)
    assert not none.plus(none).output().any()
    assert torch.equal(some.plus(some.weighted(0.0)).output(), some.output())
    shifted = replace(some, row_max=some.row_max + 3)
    assert torch.allclose(combine([some, shifted]).row_sum, torch.full((1, 2), 2 * (1 / 8 + 1)))


def test_causal_attention_keeps_its_order(make_qkv) -> None:
    grid = TokenGrid(2, 8, 8)
    q, k, v = make_qkv(1, 1, grid.tokens, 16)
    with pytest.raises(Unsupported, match="do not go together"):
        budgeted_attention(
            q,
            k,
            v,
            SparsePolicy(),
            HeadSettings.uniform(1, 0.5),
            order=cube_order(grid),
            is_causal=True,
        )
