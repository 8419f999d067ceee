# SPDX-License-Identifier: Apache-2.0
"""Very large and very small logits, beside float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparge import SparsePolicy, attention
from sparge.common.metrics import rel_l2
from sparge.kernels import Element

from .conftest import HOPPER, Kernels, int8_elements

pytestmark = pytest.mark.gpu

KERNELS = [*HOPPER, *(Kernels(e) for e in (*int8_elements(), Element.BF16))]
LARGE = (30.0, 100.0, 300.0, 700.0, 1000.0, 5000.0, 13000.0, 1e5, 1e8)
TINY = (1e-3, 1e-9, 1e-18, 1e-21, 1e-25, 1e-30, 1e-38)


def exact(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def draw(generator: torch.Generator, tokens: int, head_dim: int) -> tuple[Tensor, ...]:
    shape = (1, 2, tokens, head_dim)
    return tuple(torch.randn(shape, generator=generator).cuda() for _ in range(2))


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.id)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", LARGE)
def test_a_query_that_is_its_key_gets_its_value(
    factor, head_dim, kernels, force: Callable[[Kernels], None], generator
) -> None:
    force(kernels)
    q, v = draw(generator, 640, head_dim)
    q, v = (q * factor).bfloat16(), v.bfloat16()
    out, lse = attention(q, q, v, SparsePolicy(topk=1.0), return_lse=True)
    own = q.double().square().sum(-1) * head_dim**-0.5
    assert rel_l2(out, exact(q, q, v)) < 0.05
    torch.testing.assert_close(lse.double(), own, rtol=0.02, atol=1.0)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.id)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("factor", TINY)
def test_tiny_logits_average_the_values(
    factor, is_causal, kernels, force: Callable[[Kernels], None], generator
) -> None:
    force(kernels)
    q, v = draw(generator, 300, 64)
    q, v = (q * factor).bfloat16(), v.bfloat16()
    q[:, :, 100:164] = 0  # a query block's half and a key block of zeros beside them
    out = attention(q, q, v, SparsePolicy(topk=1.0), is_causal=is_causal)
    assert rel_l2(out, exact(q, q, v, is_causal)) < 0.05


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.id)
@pytest.mark.parametrize("factor", [1e-18, 1e-6, 1e6, 1e18])
def test_large_queries_meet_tiny_keys(
    factor, kernels, force: Callable[[Kernels], None], generator
) -> None:
    force(kernels)
    q, k = draw(generator, 300, 128)
    v = torch.randn(k.shape, generator=generator).cuda().bfloat16()
    q, k = (q * factor).bfloat16(), (k / factor).bfloat16()
    assert rel_l2(attention(q, k, v, SparsePolicy(topk=1.0)), exact(q, k, v)) < 0.05


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.id)
@pytest.mark.parametrize("factor", [1e-30, 1e-10, 1e10, 1e30])
def test_values_of_any_magnitude(
    factor, kernels, force: Callable[[Kernels], None], generator
) -> None:
    force(kernels)
    q, v = draw(generator, 1000, 64)
    q, v = q.bfloat16(), ((v + 1) * factor).bfloat16()
    out = attention(q, q, v, SparsePolicy(topk=1.0), output_dtype=torch.float32)
    assert rel_l2(out.double() / factor, exact(q, q, v) / factor) < 0.05
