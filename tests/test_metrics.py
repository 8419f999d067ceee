# SPDX-License-Identifier: Apache-2.0
"""Errors against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from sparge.common.metrics import cosine, rel_l1, rel_l2


def test_by_hand() -> None:
    value, truth = torch.tensor([3.0, 0.0]), torch.tensor([3.0, -4.0])
    assert rel_l1(value, truth) == pytest.approx(4 / 7)
    assert rel_l2(value, truth) == pytest.approx(4 / 5)
    assert cosine(value, truth) == pytest.approx(3 / 5)


def test_sums_do_not_saturate_in_half_precision() -> None:
    truth = torch.full((100_000,), 60_000.0, dtype=torch.float16)
    assert rel_l1(truth, truth) == 0
    assert rel_l2(truth * 0.5, truth) == pytest.approx(0.5)
    assert cosine(truth, -truth) == pytest.approx(-1)


def test_zero_nan_and_other_shapes() -> None:
    zero, one, nan = torch.zeros(3), torch.ones(3), torch.tensor([math.nan, 1.0, 1.0])
    assert (rel_l1(zero, zero), rel_l2(zero, zero), cosine(zero, zero)) == (0, 0, 1)
    assert (rel_l1(one, zero), rel_l2(one, zero), cosine(one, zero)) == (math.inf, math.inf, 0)
    assert all(math.isnan(metric(nan, one)) for metric in (rel_l1, rel_l2, cosine))
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        rel_l1(torch.ones(2), torch.ones(3))
