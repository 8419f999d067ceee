# SPDX-License-Identifier: Apache-2.0
"""Rules that the route kernel is told beside its tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Select(enum.IntEnum):
    """Selection among the blocks that nothing forces; as in ``csrc/params.cuh``."""

    TOPK = 0
    CDF = 1
    MASK = 2


@dataclass(frozen=True)
class RouteRules:
    """Scalars of a policy as route reads them; ``select`` is a ``Select``."""

    select: int
    topk_blocks: int
    cdfthreshd: float
    simthreshd1: float
    scale: float
    causal: bool
    attention_sink: bool
    keep_diagonal: bool
    exact_prefix: int
    exact_suffix: int
    floor: int = 1
    upstream: bool = True
    """Upstream's semantics: without an order and head settings. Else a block's mass counts its
    keys, and top-k makes whole steps of attend."""
