# SPDX-License-Identifier: Apache-2.0
"""Ranks of an order's variants: every token once, blocks of their shape, other borders."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sparge.order.variants import VARIANTS, OrderKind, order_ranks, unmeasured_kind

Grid = tuple[int, int, int]
VIDEOS = [
    (28, 30, 53),  # Mochi 848x480, 163 frames
    (13, 30, 45),  # CogVideoX 720x480, 49 frames
    (21, 30, 52),  # Wan 832x480, 81 frames
    (21, 52, 30),  # the same upright
    (33, 45, 80),  # HunyuanVideo 720p
    (16, 22, 40),  # LTXV
]
SHORT = [(4, 40, 60), (3, 40, 60), (2, 40, 60), (2, 30, 52), (1, 64, 64), (1, 45, 80)]
EDGES = [(1, 1, 1), (1, 1, 200), (200, 1, 1), (1, 7, 1), (2, 3, 1), (5, 1, 9), (3, 5, 1)]
CASES = [(grid, order_kind) for grid in VIDEOS + SHORT for order_kind in OrderKind]
CUBE_VARIANCE = 3 * (4**2 - 1) / 12  # squared distance from the centre, mean over 4 x 4 x 4 tokens


def visited(
    grid: Grid, variant: int = 0, order_kind: OrderKind = OrderKind.CUBES
) -> NDArray[np.int64]:
    """(tokens, 3) coordinates in that order, which has every token once."""
    ranks = order_ranks(order_kind, *grid, variant)
    assert ranks.shape == grid and ranks.dtype == np.int32
    order = np.argsort(ranks.ravel())
    assert np.array_equal(ranks.ravel()[order], np.arange(ranks.size))
    return np.stack(np.unravel_index(order, grid), -1)


def variance(coordinates: NDArray[np.int64], block: int) -> NDArray[np.float64]:
    """(whole blocks,) mean squared distance from the block's centre."""
    whole = coordinates[: len(coordinates) // block * block].reshape(-1, block, 3)
    return whole.var(1).sum(-1)


def test_every_token_has_its_place_in_any_grid(seed: int) -> None:
    drawn = np.random.default_rng(seed).integers(1, 24, (40, 3)).tolist()
    for grid in [*EDGES, *map(tuple, drawn)]:
        for order_kind in OrderKind:
            for variant in range(VARIANTS):
                visited(grid, variant, order_kind)


@pytest.mark.parametrize("grid", VIDEOS, ids=str)
def test_variants_of_videos_go_along_another_axis(grid: Grid) -> None:
    along = []
    for variant in range(VARIANTS):
        steps = np.abs(np.diff(visited(grid, variant)[::64], axis=0)).sum(0)
        along.append(int(steps.argmax()))
    assert sorted(along) == [0, 1, 2]
    assert grid[along[0]] == max(grid)


@pytest.mark.parametrize("grid", [*VIDEOS, (2, 30, 52), (1, 45, 80)], ids=str)
def test_blocks_of_real_grids_are_nearly_cubes_and_never_leap(grid: Grid) -> None:
    """A block that a column cannot fill goes on beside it, not at the other end of the picture."""
    coordinates = visited(grid)
    assert np.abs(np.diff(coordinates, axis=0)).max() <= 16
    assert variance(coordinates, 64).max() < 10 * CUBE_VARIANCE
    if grid in VIDEOS:
        assert variance(coordinates, 64).mean() < 1.15 * CUBE_VARIANCE
        # Two cubes side by side: 4 x 4 x 8.
        assert variance(coordinates, 128).mean() < 1.2 * (CUBE_VARIANCE + 4)


@pytest.mark.parametrize(("grid", "order_kind"), CASES, ids=str)
def test_variants_have_compact_blocks_of_other_borders(grid: Grid, order_kind: OrderKind) -> None:
    """The median block counts: a few of a variant hold the last tokens of a frame and the first."""
    orders = [visited(grid, variant, order_kind) for variant in range(VARIANTS)]
    for block in (64, 128):
        found = [float(np.median(variance(order, block))) for order in orders]
        assert max(found) < 1.5 * min(found)
    if grid[0] < 8:
        return
    blocks = [order_ranks(order_kind, *grid, variant).ravel() // 64 for variant in range(VARIANTS)]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        meetings = np.unique(np.stack([blocks[one], blocks[other]]), axis=1).shape[1]
        assert meetings > (1.4 if order_kind is OrderKind.CUBES else 1.9) * (blocks[one].max() + 1)


@pytest.mark.parametrize("grid", [(4, 6, 9), (5, 6, 9), (2, 3, 2), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("variant", range(VARIANTS))
def test_rows_of_a_video_never_leap(grid: Grid, variant: int) -> None:
    """They do not where the frame changes, and in later variants not where its last tokens come
    first; at most along a row."""
    frame, row, _ = visited(grid, variant, OrderKind.ROWS).T
    to_next = slice(None) if variant else slice(-1)
    leap = np.abs(np.roll(row, -1) - row)[to_next]
    assert leap.max() <= 1
    assert not leap[(np.roll(frame, -1) != frame)[to_next]].any()


def test_where_later_variants_begin() -> None:
    """Variants of an image begin at the other end, those of a video thirds of a key block later."""
    for order_kind, variant in ((OrderKind.CUBES, 2), (OrderKind.ROWS, 1)):
        first, later = (order_ranks(order_kind, 1, 45, 80, each) for each in (0, variant))
        assert np.array_equal(later, np.flip(first))
    first, *moved = (order_ranks(OrderKind.ROWS, 4, 6, 9, variant) for variant in range(VARIANTS))
    for ranks, later in zip(moved, (21, 42), strict=True):
        assert np.array_equal(ranks, (first + later) % first.size)
    kinds = [unmeasured_kind(variant) for variant in range(VARIANTS)]
    assert kinds == [OrderKind.CUBES, OrderKind.ROWS, OrderKind.CUBES], "of unmeasured heads"
