# SPDX-License-Identifier: Apache-2.0
"""What the route kernel is told beside its tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Select(enum.IntEnum):
    """What decides among the blocks that nothing forces; as in ``csrc/params.cuh``."""

    TOPK = 0
    CDF = 1
    MASK = 2


@dataclass(frozen=True)
class RouteRules:
    """The scalars of a policy by their names in `RouteParams`; ``select`` is a ``Select``."""

    select: int
    topk_blocks: int
    cdfthreshd: float
    simthreshd1: float
    score_scale: float
    causal: bool
    attention_sink: bool
    keep_diagonal: bool
    exact_prefix: int
    exact_suffix: int
    floor: int = 1
    upstream: bool = True
    """Its semantics: without an order and a budget. Else a block's mass counts its keys, and top-k
    makes whole steps of attend."""
