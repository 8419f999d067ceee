# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from sparge.order.grid import TokenOrder


def blocks_of(order: TokenOrder | None, tokens: int, size: int) -> list[list[int]]:
    """Tokens of each block of `size` slots, in the order's slots or one after another."""
    slots = list(range(tokens)) if order is None else order.slot_token.tolist()
    return [
        [token for token in slots[start : start + size] if token >= 0]
        for start in range(0, len(slots), size)
    ]
