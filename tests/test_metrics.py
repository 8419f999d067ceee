# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch

from benchmarks.metrics import cosine, rel_l1, rel_l2


def test_by_hand() -> None:
    value, truth = torch.tensor([3.0, 0.0]), torch.tensor([3.0, -4.0])
    found = rel_l1(value, truth), rel_l2(value, truth), cosine(value, truth)
    assert found == pytest.approx((4 / 7, 4 / 5, 3 / 5))
    large = torch.full((100_000,), 60_000.0, dtype=torch.float16)  # sums do not saturate
    assert (rel_l1(large, large), rel_l2(large * 0.5, large)) == pytest.approx((0, 0.5))
    assert cosine(large, -large) == pytest.approx(-1)
    zero, one, nan = torch.zeros(3), torch.ones(3), torch.tensor([math.nan, 1.0, 1.0])
    assert (rel_l1(zero, zero), rel_l2(zero, zero), cosine(zero, zero)) == (0, 0, 1)
    assert (rel_l1(one, zero), rel_l2(one, zero), cosine(one, zero)) == (math.inf, math.inf, 0)
    assert all(math.isnan(metric(nan, one)) for metric in (rel_l1, rel_l2, cosine))
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        rel_l1(torch.ones(2), torch.ones(3))
