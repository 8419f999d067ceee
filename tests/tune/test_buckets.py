# SPDX-License-Identifier: Apache-2.0
"""Parts of attention by bucket, which measurement puts together for any candidate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparge.common.metrics import rel_l2
from sparge.common.partial import Partial
from sparge.head_settings import HeadSettings
from sparge.kernels.spec import Element
from sparge.order.grid import TokenGrid, cube_order
from sparge.policy import SparsePolicy
from sparge.reference import attend, quantize_qkv, route
from sparge.tune.measure import bucket_partials
from tests.tune.parts import combine, weighted

ROUNDING = 0.001  # relative, of the whole output, in FP16


@pytest.mark.parametrize("pool_weights", [[0.0, 0.0], [1.0, 0.3], [0.0, 2.0]])
def test_buckets_of_ranks_combine_to_any_candidate(make_qkv, pool_weights: list[float]) -> None:
    """(A + g R) / (a + g r): what measurement scores is what attention then computes."""
    grid = TokenGrid(5, 9, 13, prefix=10)
    q, k, v = make_qkv(1, 2, grid.tokens, 16, dtype=torch.float16)
    x = quantize_qkv(q, k, v, cube_order(grid), element=Element.FP16)
    routed = route(x, SparsePolicy(), HeadSettings.uniform(2, 0.5), scale=0.25)
    # Forced blocks first, which every candidate computes exactly; then ranks, two to a bucket.
    buckets = torch.where(routed.rank < 0, 0, routed.rank // 2 + 1)
    buckets = buckets.masked_fill(~routed.valid, -1)
    count = int(buckets.max()) + 1
    parts = bucket_partials(x, buckets, count, 0.25)
    pool_weight = torch.tensor(pool_weights)
    for split in range(1, count + 1):
        exact = [part for part, _ in parts[:split]]
        pooled = [weighted(part, pool_weight[:, None]) for _, part in parts[split:]]
        found = combine([*exact, *pooled]).output()
        kept = routed.valid & (buckets < split)
        dropped = routed.valid & ~kept & (pool_weight > 0)[:, None, None]
        expected = attend(x, kept, dropped, pool_weight, scale=0.25)
        assert rel_l2(found, expected.out) < ROUNDING


def test_parts_without_keys_are_neutral() -> None:
    some = Partial(torch.ones(1, 2, 4), torch.zeros(1, 2), torch.full((1, 2), 2.0))
    none = Partial(torch.zeros(1, 2, 4), torch.full((1, 2), -torch.inf), torch.zeros(1, 2))
    for merged in (some.plus(none), none.plus(some)):
        assert torch.equal(merged.output(), some.output())
        assert torch.equal(merged.row_max, some.row_max)
    assert not none.plus(none).output().any()
    shifted = replace(some, row_max=some.row_max + 3)
    assert torch.allclose(some.plus(shifted).row_sum, torch.full((1, 2), 2 * (1 / 8 + 1)))
