# SPDX-License-Identifier: Apache-2.0
"""Very large and very small logits, beside float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sparge import SparsePolicy, attention
from sparge.common.metrics import rel_l2
from tests.gpu.conftest import Kernels, every_kernel

pytestmark = pytest.mark.gpu

#: Factors of q, k and v, tokens, head_dim and whether the call is causal.
FACTORS = (
    *((x, x, 1.0, 640, d, False) for x in (30.0, 700.0, 13000.0, 1e8) for d in (64, 128)),
    *((x, x, 1.0, 300, 64, causal) for x in (0.0, 1e-3, 1e-21, 1e-38) for causal in (False, True)),
    *((x, 1 / x, 1.0, 300, 128, False) for x in (1e-18, 1e-6, 1e6, 1e18)),
    *((1.0, 1.0, x, 1000, 64, False) for x in (1e-30, 1e-10, 1e10, 1e30)),
)


@every_kernel
@pytest.mark.parametrize(("of_q", "of_k", "of_v", "tokens", "head_dim", "is_causal"), FACTORS)
def test_as_float64_says(
    of_q, of_k, of_v, tokens, head_dim, is_causal, kernels: Kernels, force, make_qkv
) -> None:
    """Where logits are large a row gets its own value, where they are tiny the mean of all."""
    force(kernels)
    q, k, v = make_qkv(1, 2, tokens, head_dim, dtype=torch.float32, device="cuda")
    if of_q == of_k:
        k = q
    q, k, v = (q * of_q).bfloat16(), (k * of_k).bfloat16(), ((v + 1) * of_v).bfloat16()
    if of_q < 1 and of_q == of_k:
        q[:, :, 100:164] = 0  # a query block's half and a key block of zeros beside tiny ones
        k = q
    scale = 1e-3 if of_q == 0 else head_dim**-0.5  # times the infinity of a masked key: no NaN
    options = {"is_causal": is_causal, "scale": scale, "output_dtype": torch.float32}
    out, lse = attention(q, k, v, SparsePolicy(topk=1.0), return_lse=True, **options)
    truth = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=is_causal)
    assert rel_l2(out.double() / of_v, truth / of_v) < 0.05
    if of_q == of_k >= 30:
        own = q.double().square().sum(-1) * scale
        torch.testing.assert_close(lse.double(), own, rtol=0.02, atol=1.0)
