# SPDX-License-Identifier: Apache-2.0
"""A measurement of three heads, and the attention that its settings are judged by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparge.head_settings import HeadSettings
from sparge.order.grid import TokenGrid, cube_order
from sparge.policy import SparsePolicy
from sparge.reference import attention
from sparge.tune import CandidateSet, Measurement, Workload

GRID = TokenGrid(4, 8, 15, prefix=20)  # 32 slots of the last query block are empty
CANDIDATES = CandidateSet(densities=(0.2, 0.5, 1.0), pool_weights=(0.0, 0.7))
EVERY_BLOCK = 1000


def begin(layers: int = 1, **changes: Any) -> Measurement:
    options: dict[str, Any] = {
        "layers": layers,
        "heads": 3,
        "workload": Workload(cube_order(GRID)),
        "candidates": CANDIDATES,
        "blocks_a_call": EVERY_BLOCK,
        "row_step": 1,
    }
    return Measurement.begin(**(options | changes))


def attend(
    qkv: tuple[Tensor, Tensor, Tensor], head_settings: HeadSettings, workload: Workload
) -> tuple[Tensor, Tensor]:
    attended, routed = attention(*qkv, SparsePolicy(), head_settings, order=workload.order)
    return attended.out[0], routed.kept[0]


def share_of_pairs(kept: Tensor, workload: Workload) -> float:
    """Share of pairs as a mean density means it: ranked blocks of different sizes count as their
    mean."""
    order = workload.order
    keys = order.block_counts.float()
    keys[~order.keys_exact] = keys[~order.keys_exact].mean()
    pairs = torch.outer(order.query_counts().float(), keys)
    return float((kept * pairs).sum() / pairs.expand(kept.shape).sum())
