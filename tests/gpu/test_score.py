# SPDX-License-Identifier: Apache-2.0
"""The kernel that scores calibration's candidates against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparge.ops
from tests.calibrate.reference_score import score_by_reference

pytestmark = pytest.mark.gpu

BATCH, ROWS, ROUTERS, PIECES = 2, 190, 2, [1, 3, 2]


def parts(channels: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Five heads, of which a sample has six; some pieces and some pooled parts hold no key."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    exact = (BATCH, 5, ROUTERS, sum(PIECES), ROWS)
    pooled = (BATCH, 5, ROUTERS, len(PIECES) - 1, ROWS)
    exact_sum, pooled_sum = random(*exact).abs() + 0.1, random(*pooled).abs() + 0.1
    exact_max = 9 * random(*exact)
    # Of two heads nothing at first, of one nothing at all.
    exact_sum[:, 0, :, :4], exact_sum[:, 1] = 0, 0
    exact_max[exact_sum == 0] = -torch.inf
    pooled_sum[:, 1:3, :, -1] = 0
    exact_out = (random(*exact, channels) + 3) * exact_sum.unsqueeze(-1)
    pooled_out = ((random(*pooled, channels) + 3) * pooled_sum.unsqueeze(-1)).half()
    unit = random(BATCH, 5, 1, 1).abs() + 0.5
    return (
        exact_out, exact_max, exact_sum,
        pooled_out, 4 * random(BATCH, 5, ROWS), pooled_sum, unit,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [128, 64, 40])
def test_score(channels: int, dtype: torch.dtype | None, generator: torch.Generator) -> None:
    """dtype: of what dense attention gave, of which the heads are a slice."""
    ends = sum(1 << sum(PIECES[: density + 1]) - 1 for density in range(len(PIECES)))
    on_device = [x.cuda() for x in parts(channels, generator)]
    dense = None
    if dtype is not None:
        every_head = torch.randn(BATCH, 6, ROWS, channels, generator=generator) + 3
        dense = every_head.to("cuda", dtype)[:, 1:]
    fields = 4 * len(PIECES) - 1
    room = (ROUTERS, fields, 2, BATCH, 6, ROWS)
    found, expected = (torch.full(room, 77.0, device="cuda") for _ in range(2))
    own = found[:, :, 1, :, 1:]
    score_by_reference(*on_device, ends=ends, found=expected[:, :, 1, :, 1:], dense=dense)
    sparge.ops.score(*on_device, ends, own, dense)
    # Vectors of square 128 x 10 and more: products near 0 keep the rounding of those.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-3, equal_nan=True)
    torch.library.opcheck(
        sparge.ops.score, (*on_device, ends, own, dense), test_utils=("test_schema",)
    )
