# SPDX-License-Identifier: Apache-2.0
"""The cube order visits every token once, and keeps each block of 64 close together."""

from __future__ import annotations

import numpy as np
import pytest

from sparge.order.cubes import cube_ranks
from sparge.order.variants import TURNS

VIDEOS = [
    (28, 30, 53),  # Mochi 848x480, 163 frames
    (13, 30, 45),  # CogVideoX 720x480, 49 frames
    (11, 48, 85),  # CogVideoX 1.5
    (21, 30, 52),  # Wan 832x480, 81 frames
    (21, 52, 30),  # the same upright
    (33, 45, 80),  # HunyuanVideo 720p
    (16, 22, 40),  # LTXV
]
EDGES = [
    (1, 1, 1),
    (1, 1, 200),
    (200, 1, 1),
    (1, 7, 1),
    (2, 3, 1),
    (5, 1, 9),
    (3, 3, 3),
    (1, 64, 1),
]
CUBE_VARIANCE = 3 * (4**2 - 1) / 12  # squared distance from the centre, mean over 4 x 4 x 4 tokens


def visited(grid: tuple[int, int, int], turn: int = 0) -> np.ndarray:
    """(tokens, 3) coordinates in the cube order."""
    ranks = cube_ranks(*grid, turn)
    order = np.argsort(ranks.ravel())
    assert np.array_equal(ranks.ravel()[order], np.arange(ranks.size))
    return np.stack(np.unravel_index(order, grid), -1)


def variance(coordinates: np.ndarray, block: int) -> np.ndarray:
    """(whole blocks,) mean squared distance from the block's centre."""
    whole = coordinates[: len(coordinates) // block * block].reshape(-1, block, 3)
    return whole.var(1).sum(-1)


@pytest.mark.parametrize("grid", VIDEOS + EDGES, ids=str)
def test_every_token_has_its_place(grid: tuple[int, int, int]) -> None:
    ranks = cube_ranks(*grid)
    assert ranks.dtype == np.int32
    assert ranks.shape == grid
    assert np.array_equal(np.sort(ranks.ravel()), np.arange(ranks.size))


def test_every_token_has_its_place_in_any_grid(seed: int) -> None:
    for grid in np.random.default_rng(seed).integers(1, 24, (60, 3)).tolist():
        for turn in range(TURNS):
            visited(tuple(grid), turn)


@pytest.mark.parametrize("grid", VIDEOS, ids=str)
def test_turns_of_videos_go_along_another_axis(grid: tuple[int, int, int]) -> None:
    along = []
    for turn in range(TURNS):
        steps = np.abs(np.diff(visited(grid, turn)[::64], axis=0)).sum(0)
        along.append(int(steps.argmax()))
    assert sorted(along) == [0, 1, 2]
    assert grid[along[0]] == max(grid)


@pytest.mark.parametrize("grid", [(16, 32, 56), (4, 4, 4), (8, 12, 8), (24, 4, 4)], ids=str)
def test_a_grid_of_fours_is_cut_into_cubes(grid: tuple[int, int, int]) -> None:
    blocks = visited(grid).reshape(-1, 64, 3)
    assert (blocks.max(1) - blocks.min(1) == 3).all()
    assert (blocks.min(1) % 4 == 0).all()


def test_a_single_frame_is_cut_into_squares() -> None:
    blocks = visited((1, 64, 96)).reshape(-1, 64, 3)
    assert ((blocks.max(1) - blocks.min(1))[:, 1:] == 7).all()


@pytest.mark.parametrize("grid", VIDEOS, ids=str)
def test_blocks_of_real_grids_are_nearly_cubes(grid: tuple[int, int, int]) -> None:
    coordinates = visited(grid)
    assert variance(coordinates, 64).mean() < 1.15 * CUBE_VARIANCE
    # Two cubes side by side: 4 x 4 x 8.
    assert variance(coordinates, 128).mean() < 1.2 * (CUBE_VARIANCE + 4)
    raster = np.stack(np.unravel_index(np.arange(len(coordinates)), grid), -1)
    assert variance(raster, 64).mean() > 20 * CUBE_VARIANCE


@pytest.mark.parametrize("grid", [*VIDEOS, (2, 30, 52), (1, 45, 80)], ids=str)
def test_the_walk_never_leaps(grid: tuple[int, int, int]) -> None:
    """A block that a column cannot fill goes on beside it, not at the other end of the picture."""
    coordinates = visited(grid)
    steps = np.abs(np.diff(coordinates, axis=0)).max(-1)
    assert steps.max() <= 16
    assert variance(coordinates, 64).max() < 10 * CUBE_VARIANCE
