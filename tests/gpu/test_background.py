# SPDX-License-Identifier: Apache-2.0
"""Cases where terms of the mean have no say, and where they have all. `test_budgets.py` compares
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sparge import HeadBudget, TokenGrid, cube_order
from sparge import attention as public_attention
from sparge.call import make_call
from sparge.stages.pipeline import run_kernels
from tests.gpu.cases import Case, make_qkv
from tests.gpu.conftest import Kernels
from tests.gpu.test_budgets import KERNELS, PLAIN
from tests.gpu.test_stages import with_element

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "kernels", [k for k in KERNELS if k.element.name.startswith("INT8")], ids=lambda k: k.id
)
def test_a_background_stays_finite_where_what_is_kept_lies_far_below_it(
    kernels: Kernels, generator: torch.Generator, force: Callable[[Kernels], None]
) -> None:
    """All that is kept weighs nothing beside it: rows are the mean value."""
    force(kernels)
    q, k, v = make_qkv(Case("far below", heads=1, kv_heads=1, queries=640, keys=640), generator)
    q, k = q.abs() + 1, torch.zeros_like(k)
    k[:, :, :64] = -200.0
    policy = with_element(PLAIN, kernels.element)
    mask = torch.zeros(1, 1, 5, 10, dtype=torch.bool, device="cuda")
    mask[..., 0] = True
    far = public_attention(q, k, v, policy, block_mask=mask, return_lse=True)
    assert torch.isfinite(far[1]).all() and (far[1] < -1000).all()
    call = make_call(q, k, v, policy, "HND", False, 1.0, None, mask, None, None, None)
    table = HeadBudget(
        torch.ones(1, device="cuda"),
        torch.zeros(1, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        background=torch.ones(1, device="cuda"),
    ).table(policy)
    out, lse = torch.full_like(q, float("nan")), torch.full((1, 1, 640), 0.0, device="cuda")
    run_kernels(replace(call, thresholds=table), out, lse, None)
    assert torch.isfinite(lse).all()
    mean = v.float().mean(2, keepdim=True).expand_as(out)
    assert torch.allclose(out.float(), mean, atol=2e-2)


@pytest.mark.parametrize(("name", "none", "some"), [("background", 0.0, 1.5), ("contrast", 1, 1.5)])
def test_only_heads_that_have_it_and_blocks_that_drop_change(
    name: str, none: float, some: float, generator: torch.Generator
) -> None:
    grid = TokenGrid(6, 16, 16, prefix=80)
    q, k, v = make_qkv(
        Case("background", heads=2, queries=grid.tokens, keys=grid.tokens), generator
    )
    plain = HeadBudget.uniform(2, 0.3, device="cuda")
    off, one = (torch.tensor([none, float(x)], device="cuda") for x in (none, some))
    without, unchanged, changed = (
        public_attention(
            q,
            k,
            v,
            budget=replace(plain, **{name: values}),
            order=cube_order(grid),
        )
        for values in (None, off, one)
    )
    assert torch.equal(without, unchanged)
    assert torch.equal(without[:, 0], changed[:, 0])
    assert torch.equal(without[:, 1, :80], changed[:, 1, :80]), "text drops nothing"
    assert (without[:, 1, 128:] != changed[:, 1, 128:]).any(-1).all()
