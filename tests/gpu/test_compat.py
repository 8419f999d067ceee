# SPDX-License-Identifier: Apache-2.0
"""Upstream's functions on kernels: block maps and tuned thresholds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparge.compat.autotune import SparseAttentionMeansim
from sparge.compat.tuning import relative_l1
from sparge.compat.utils import get_block_map_meansim

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("blocks", [(128, 64), (64, 128)])
def test_block_maps_are_those_of_the_cpu(make_qkv, blocks: tuple[int, int]) -> None:
    """But for blocks whose scores sums in another order exchange."""
    q, k, _ = make_qkv(1, 4, 2000, 64, device="cuda")
    options: dict[str, Any] = {"BLKQ": blocks[0], "BLKK": blocks[1], "topk": 0.3}
    kept = get_block_map_meansim(q, k, cdfthreshd=None, simthreshd1=-1, **options)
    expected = get_block_map_meansim(q.cpu(), k.cpu(), cdfthreshd=None, simthreshd1=-1, **options)
    assert (kept.cpu() == expected).float().mean() > 0.998


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tune_pv", [True, False])
def test_tuned_heads_keep_to_their_bound(
    generator: torch.Generator, head_dim: int, tune_pv: bool
) -> None:
    kinds = torch.randn(1, 4, 16, 1, head_dim, generator=generator)

    def tokens(noise: float) -> Tensor:
        around = noise * torch.randn(1, 4, 16, 125, head_dim, generator=generator)
        return (kinds + around).flatten(2, 3).bfloat16().cuda()

    q, k, v = 0.7 * tokens(0.3), tokens(0.3), torch.randn(4, 2000, head_dim, generator=generator)
    v = v.unsqueeze(0).bfloat16().cuda()
    attend = SparseAttentionMeansim(l1=0.06, pv_l1=0.07, tune_pv=tune_pv)
    exact = attend(q, k, v, tune_mode=True)
    assert torch.equal(exact, scaled_dot_product_attention(q, k, v))
    out, sparsity = attend(q, k, v, return_sparsity=True)
    assert sparsity > 0.1
    assert attend.is_sparse is not None and attend.is_sparse.any()  # E4M3 may err more than a bound
    assert (relative_l1(out, exact) < (0.07 if tune_pv else 0.06)).all()
