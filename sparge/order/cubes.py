# SPDX-License-Identifier: Apache-2.0
"""Cube order: tokens of a 3-D grid in a sequence whose every 64 lie close together.

Two axes are split into near-equal parts. That leaves columns along the third axis, the longest one
in variant 0. A serpentine runs through all columns, slab by slab, and every 64 tokens
along it make a block of about 4 x 4 x 4 (8 x 8 in a single frame). The cuts need no padding: a
block that a column cannot fill goes on in the neighbouring column.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..blocks import KEY_BLOCK

LEAST_COLUMN = 8  # tokens: two cubes


def cube_ranks(frames: int, height: int, width: int, variant: int = 0) -> NDArray[np.int32]:
    """(frames, height, width) int32: the place of each token in the cube order, from 0.

    variant: number of the variant. Columns go along the longest, then the second, then the shortest
    axis; not along one so short that most blocks would lie in two columns. Variants that are left
    over in flat grids begin at the other end, where blocks are the same if columns hold whole
    numbers of them (docs/experiments.md, Variants of cubes).
    """
    sizes = (frames, height, width)
    axes = sorted(range(3), key=lambda axis: (sizes[axis], axis), reverse=True)
    axes = [axis for axis in axes if sizes[axis] >= LEAST_COLUMN] or axes[:1]
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
