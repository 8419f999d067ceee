# SPDX-License-Identifier: Apache-2.0
"""Upstream's thresholds, tuned on the kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sparge.compat.autotune import SparseAttentionMeansim
from sparge.compat.tuning import relative_l1

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("tune_pv", "bound"), [(True, 0.07), (False, 0.06)])
def test_tuned_heads_keep_to_their_bound(
    generator: torch.Generator, head_dim: int, tune_pv: bool, bound: float
) -> None:
    kinds = torch.randn(1, 4, 16, 1, head_dim, generator=generator)
    noise = 0.3 * torch.randn(2, 4, 16, 125, head_dim, generator=generator)
    around = (kinds + noise).flatten(2, 3).bfloat16().cuda()
    v = torch.randn(1, 4, 2000, head_dim, generator=generator).bfloat16().cuda()
    q, k = 0.7 * around[:1], around[1:]
    attend = SparseAttentionMeansim(l1=0.06, pv_l1=0.07, tune_pv=tune_pv)
    exact = attend(q, k, v, tune_mode=True)
    assert torch.equal(exact, scaled_dot_product_attention(q, k, v))
    out, sparsity = attend(q, k, v, return_sparsity=True)
    assert sparsity > 0.1
    assert attend.is_sparse is not None and attend.is_sparse.any()  # E4M3 may err more than a bound
    assert (relative_l1(out, exact) < bound).all()
