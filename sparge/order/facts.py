# SPDX-License-Identifier: Apache-2.0
"""Tensors of a `TokenOrder` that kernels read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class OrderFacts:
    """Tensors on the kernels' device; all None without an order."""

    slot_tokens: Tensor | None = None
    slot_counts: Tensor | None = None
    head_order_kind: Tensor | None = None
    keys_exact: Tensor | None = None
    queries_exact: Tensor | None = None

    @property
    def order_kinds(self) -> int:
        return 1 if self.slot_tokens is None else self.slot_tokens.shape[0]

    @property
    def slots(self) -> int | None:
        return None if self.slot_tokens is None else self.slot_tokens.shape[1]

    def flat(self) -> list[Tensor | None]:
        """In the order of the fields, for an op's schema."""
        return [
            self.slot_tokens,
            self.slot_counts,
            self.head_order_kind,
            self.keys_exact,
            self.queries_exact,
        ]


NO_ORDER = OrderFacts()
