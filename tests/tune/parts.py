# SPDX-License-Identifier: Apache-2.0
"""Parts of attention put together as measurement says that they may be."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from sparge.common.partial import Partial


def weighted(part: Partial, pool_weight: Tensor | float) -> Partial:
    """Part with every key counted `pool_weight` times; broadcasts against (..., R)."""
    pool_weight = torch.as_tensor(pool_weight).expand_as(part.row_sum)
    unnormalised = part.unnormalised * pool_weight.unsqueeze(-1)
    return Partial(unnormalised, part.row_max, part.row_sum * pool_weight)


def combine(parts: Iterable[Partial]) -> Partial:
    """All parts, over disjoint keys, put together."""
    return reduce(Partial.plus, parts)
