# SPDX-License-Identifier: Apache-2.0
"""The widgets of SpargeAttention as one frozen value; their defaults are here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..sparge import SparsePolicy
from .blocks import BlockSpans


@dataclass(frozen=True)
class Settings:
    """Field names and order are the widgets' names and order, which saved graphs rely on."""

    mode: str = "manual"
    topk: float = 0.5
    pvthreshd: float = 15.0
    start_percent: float = 0.2
    end_percent: float = 1.0
    min_tokens: int = 4096
    dense_blocks: str = ""
    select_by: str = "topk"
    cdfthreshd: float = 0.98
    simthreshd1: float = -0.1

    @cached_property
    def dense_spans(self) -> BlockSpans:
        return BlockSpans.parse(self.dense_blocks)

    def policy(self, exact_prefix: int, exact_suffix: int) -> SparsePolicy:
        return SparsePolicy(
            select_by=self.select_by,
            topk=self.topk,
            cdfthreshd=self.cdfthreshd,
            simthreshd1=self.simthreshd1,
            pvthreshd=self.pvthreshd,
            exact_prefix=exact_prefix,
            exact_suffix=exact_suffix,
        )
