# SPDX-License-Identifier: Apache-2.0
"""Token orders of a grid: permutations of its tokens, cut into key blocks of 64.

A head whose attention has the shape of those blocks keeps few of them. Each order comes in
variants, whose blocks have about the same shape and other borders. Sampling steps take them in
turn: what a head drops in one step it may keep in the next, so that its errors add up less.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from ..blocks import KEY_BLOCK
from .cubes import cube_ranks

#: Variants of every order (docs/experiments.md, Number of variants).
VARIANTS = 3


class OrderKind(enum.IntEnum):
    """Shape of the blocks that an order makes. Heads differ in which suits them
    (docs/experiments.md, Who takes cubes and who rows)."""

    CUBES = 0
    """About 4 frames x 4 x 4."""
    ROWS = 1
    """Rows of a frame, for heads that look along rows."""


def unmeasured_kind(variant: int) -> OrderKind:
    """Order of heads that nobody measured: rows in the second variant, cubes in the others.

    Steps that cut the clip in different ways drop different things (docs/experiments.md, Order of
    unmeasured heads).
    """
    return OrderKind.ROWS if variant == 1 else OrderKind.CUBES


def order_ranks(
    order_kind: OrderKind, frames: int, height: int, width: int, variant: int = 0
) -> NDArray[np.int32]:
    """(frames, height, width) int32: the place of each token in the order, from 0.

    variant: number of the variant. Cubes of another variant go along another axis. Rows of a video
    begin a share of a key block later in each variant, and the last tokens come first. Rows of an
    image begin at the other end in every second variant.
    """
    if order_kind is OrderKind.CUBES:
        return cube_ranks(frames, height, width, variant)
    if frames == 1:
        path = _rows(height, width)[None]
        return np.flip(path) if variant % 2 else path
    ranks = _frame_by_frame(frames, height, width, meets=variant > 0)
    return (ranks + np.int32(variant * KEY_BLOCK // VARIANTS)) % np.int32(ranks.size)


def _frame_by_frame(frames: int, height: int, width: int, meets: bool) -> NDArray[np.int32]:
    """Ranks that run forth in one frame and back in the next, so that neighbours in the order lie
    close together.

    meets: the order also ends in the place of a frame where it began.

    A query block that holds tokens of two places keeps what the mean of its queries asks for: the
    few of one place lose their neighbours (docs/experiments.md, Rows forth and back).
    """
    area = height * width
    forth = _rows(height, width)
    both = np.stack([forth, area - 1 - forth])
    ranks = both[np.arange(frames) % 2]
    if meets and frames % 2 and width > 1:
        half = width // 2
        back = area - 1 - _rows(height, width - half)
        ranks[-1] = np.concatenate([_rows(height, half), back], axis=1)
    return ranks + np.arange(frames, dtype=np.int32)[:, None, None] * np.int32(area)


def _rows(height: int, width: int) -> NDArray[np.int32]:
    """(height, width): ranks in one frame."""
    return np.arange(height * width, dtype=np.int32).reshape(height, width)
