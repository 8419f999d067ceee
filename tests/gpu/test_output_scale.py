# SPDX-License-Identifier: Apache-2.0
"""Where the output scale (`output_scale`) has no say. `test_budgets.py` compares it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparge import HeadSettings, TokenGrid, cube_order
from sparge import attention as public_attention
from tests.gpu.cases import Case, make_qkv

pytestmark = pytest.mark.gpu


def test_only_heads_that_have_it_and_blocks_that_drop_change(generator: torch.Generator) -> None:
    grid = TokenGrid(6, 16, 16, prefix=80)
    q, k, v = make_qkv(
        Case("output_scale", heads=2, queries=grid.tokens, keys=grid.tokens), generator
    )
    plain = HeadSettings.uniform(2, 0.3, device="cuda")
    ones, one = (torch.tensor([1.0, x], device="cuda") for x in (1.0, 1.5))
    without, unchanged, changed = (
        public_attention(
            q, k, v, head_settings=replace(plain, output_scale=values), order=cube_order(grid)
        )
        for values in (None, ones, one)
    )
    assert torch.equal(without, unchanged)
    assert torch.equal(without[:, 0], changed[:, 0])
    assert torch.equal(without[:, 1, :80], changed[:, 1, :80]), "text drops nothing"
    assert (without[:, 1, 128:] != changed[:, 1, 128:]).any(-1).all()
