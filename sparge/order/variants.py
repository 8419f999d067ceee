# SPDX-License-Identifier: Apache-2.0
"""Token orders of a grid: permutations of its tokens, cut into key blocks of 64.

A head whose attention has the shape of those blocks keeps few of them. Each order comes in
variants, whose blocks have about the same shape and other borders. Sampling steps take them in
turn: what a head drops in one step it may keep in the next, so that its errors add up less.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..blocks import KEY_BLOCK

#: Variants of every order (docs/experiments.md, Number of variants).
VARIANTS = 3
#: Tokens of the shortest axis that columns of cubes go along: two cubes.
_LEAST_COLUMN = 8


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
        return _cube_ranks(frames, height, width, variant)
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


def _cube_ranks(frames: int, height: int, width: int, variant: int) -> NDArray[np.int32]:
    """Ranks in which every 64 tokens lie close together.

    Two axes are split into near-equal parts. That leaves columns along the third axis, the longest
    one in variant 0. A serpentine runs through all columns, slab by slab, and every 64 tokens along
    it make a block of about 4 x 4 x 4 (8 x 8 in a single frame). The cuts need no padding: a block
    that a column cannot fill goes on in the neighbouring column.

    variant: number of the variant. Columns go along the longest, then the second, then the shortest
    axis; not along one so short that most blocks would lie in two columns. Variants that are left
    over in flat grids begin at the other end, where blocks are the same if columns hold whole
    numbers of them (docs/experiments.md, Variants of cubes).
    """
    sizes = (frames, height, width)
    axes = sorted(range(3), key=lambda axis: (sizes[axis], axis), reverse=True)
    axes = [axis for axis in axes if sizes[axis] >= _LEAST_COLUMN] or axes[:1]
    ranks = _along(axes[variant % len(axes)], sizes)
    return ranks if variant < len(axes) else np.flip(ranks)


def _along(travel: int, sizes: tuple[int, int, int]) -> NDArray[np.int32]:
    """Ranks with columns along the axis `travel`."""
    outer, inner = (axis for axis in range(3) if axis != travel)
    parts = _column_parts(sizes[outer], sizes[inner])
    rows = _Split.of(sizes[outer], parts[0])
    columns = _Split.of(sizes[inner], parts[1])

    back = rows.part % 2 == 1  # every second row of columns is visited from its far end
    visit = np.where(back[:, None], parts[1] - 1 - columns.part, columns.part)
    place = rows.part[:, None] * parts[1] + visit
    area = np.outer(rows.size, columns.size)
    slab = area[rows.part[:, None], columns.part]

    visited = area.copy()
    visited[1::2] = visited[1::2, ::-1]
    before = np.cumsum(visited) - visited.ravel()
    inside = rows.offset[:, None] * columns.size[columns.part] + columns.offset
    steps = np.arange(sizes[travel])
    along = np.where((place % 2 == 1)[..., None], sizes[travel] - 1 - steps, steps)
    ranks = before[place][..., None] * sizes[travel] + along * slab[..., None] + inside[..., None]
    return np.ascontiguousarray(np.moveaxis(ranks, (0, 1, 2), (outer, inner, travel)), np.int32)


def _column_parts(outer: int, inner: int) -> tuple[int, int]:
    """Number of parts of the two split axes: those whose blocks have the least squared extent."""
    rows = np.arange(1, outer + 1)[:, None]
    columns = np.arange(1, inner + 1)[None]
    length = KEY_BLOCK * rows * columns / (outer * inner)
    extent = (outer / rows) ** 2 + (inner / columns) ** 2 + length**2
    best = int(extent.argmin())
    return best // inner + 1, best % inner + 1


class _Split(NamedTuple):
    """One axis cut into near-equal parts."""

    part: NDArray[np.int64]  # number of the part that each index is in
    offset: NDArray[np.int64]  # place of each index in its part
    size: NDArray[np.int64]  # size of each part

    @classmethod
    def of(cls, length: int, parts: int) -> _Split:
        index = np.arange(length)
        part = index * parts // length
        size = np.bincount(part, minlength=parts)
        start = np.cumsum(size) - size
        return cls(part, index - start[part], size)
