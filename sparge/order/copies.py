# SPDX-License-Identifier: Apache-2.0
"""Copies of token orders on other devices: the last few of all orders together are kept."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from .variants import VARIANTS

if TYPE_CHECKING:
    from .grid import TokenOrder

#: Number of kept copies: four grids in all variants. The copy of a long video's order has 2 MB.
KEPT = 4 * VARIANTS


_kept: deque[tuple[weakref.ref[TokenOrder], torch.device]] = deque()
_lock = threading.Lock()


def remember(order: TokenOrder, device: torch.device) -> None:
    """Notes that `order` has a new copy on `device`; the oldest one is forgotten where there are
    too many."""
    with _lock:
        _drop(order, device)
        _kept.append((weakref.ref(order), device))
        while len(_kept) > KEPT:
            owner, where = _kept.popleft()
            if (oldest := owner()) is not None:
                oldest.forget_copy(where)


def keep_for_good(order: TokenOrder, device: torch.device) -> None:
    """Lets the copy of `order` on `device` live as long as the order."""
    with _lock:
        _drop(order, device)


def _drop(order: TokenOrder, device: torch.device) -> None:
    for entry in list(_kept):
        owner = entry[0]()
        if owner is None or (owner is order and entry[1] == device):
            _kept.remove(entry)
