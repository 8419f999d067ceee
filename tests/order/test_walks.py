# SPDX-License-Identifier: Apache-2.0
"""Turns of a walk: every token once, blocks of about the same shape, other borders."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sparge.order.variants import TURNS, Walk, unmeasured_walk, walk_ranks

GRIDS = [
    (28, 30, 53),  # Mochi 848x480, 163 frames
    (13, 30, 45),  # CogVideoX 720x480, 49 frames
    (21, 30, 52),  # Wan 832x480, 81 frames
    (16, 22, 40),  # LTXV
    (4, 40, 60),
    (3, 40, 60),
    (2, 40, 60),
    (1, 64, 64),  # Flux 1024x1024
    (1, 45, 80),
]
CASES = [(grid, walk) for grid in GRIDS for walk in Walk]


def turns(walk: Walk, grid: tuple[int, int, int]) -> list[NDArray[np.int32]]:
    return [walk_ranks(walk, *grid, turn).ravel() for turn in range(TURNS)]


def spread(ranks: NDArray[np.int32], grid: tuple[int, int, int], block: int) -> float:
    """Squared distance of tokens from the centre of their block, of the median block: a few of a
    turn hold the last tokens of a frame or of all, and the first."""
    tokens = np.stack(np.unravel_index(np.argsort(ranks), grid), -1)
    whole = tokens[: len(tokens) // block * block].reshape(-1, block, 3)
    return float(np.median(whole.var(1).sum(-1)))


@pytest.mark.parametrize(("grid", "walk"), CASES, ids=str)
def test_every_turn_has_every_token_once(grid: tuple[int, int, int], walk: Walk) -> None:
    for turn in range(TURNS):
        ranks = walk_ranks(walk, *grid, turn)
        assert ranks.shape == grid and ranks.dtype == np.int32
        assert np.array_equal(np.sort(ranks.ravel()), np.arange(ranks.size))


@pytest.mark.parametrize(("grid", "walk"), CASES, ids=str)
@pytest.mark.parametrize("block", [64, 128], ids=["key block", "query block"])
def test_blocks_of_all_turns_are_as_compact(
    grid: tuple[int, int, int], walk: Walk, block: int
) -> None:
    found = [spread(ranks, grid, block) for ranks in turns(walk, grid)]
    assert max(found) < 1.5 * min(found)


@pytest.mark.parametrize(("grid", "walk"), [c for c in CASES if c[0][0] >= 8], ids=str)
def test_key_blocks_of_two_turns_have_other_borders(grid: tuple[int, int, int], walk: Walk) -> None:
    blocks = [ranks // 64 for ranks in turns(walk, grid)]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        meetings = np.unique(np.stack([blocks[one], blocks[other]]), axis=1).shape[1]
        assert meetings > (1.4 if walk is Walk.CUBES else 1.9) * (blocks[one].max() + 1)


@pytest.mark.parametrize("grid", [(4, 6, 9), (5, 6, 9), (2, 3, 2), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("turn", range(TURNS))
def test_rows_of_a_video_never_leap(grid: tuple[int, int, int], turn: int) -> None:
    """They do not where the frame changes, and in later variants not where its last tokens come
    first; at most along a row."""
    ranks = walk_ranks(Walk.RASTER, *grid, turn)
    frame, row, _ = np.unravel_index(np.argsort(ranks, axis=None), grid)
    to_next = slice(None) if turn else slice(-1)
    leap = np.abs(np.roll(row, -1) - row)[to_next]
    assert leap.max() <= 1
    assert not leap[(np.roll(frame, -1) != frame)[to_next]].any()


@pytest.mark.parametrize(("walk", "turn"), [(Walk.CUBES, 2), (Walk.RASTER, 1)])
def test_a_later_turn_of_an_image_begins_at_the_other_end(walk: Walk, turn: int) -> None:
    first, later = (walk_ranks(walk, 1, 45, 80, turn) for turn in (0, turn))
    assert np.array_equal(later, np.flip(first))


@pytest.mark.parametrize(("turn", "later"), [(1, 21), (2, 42)])
def test_later_rows_of_a_video_begin_thirds_of_a_key_block_later(turn: int, later: int) -> None:
    first, moved = (walk_ranks(Walk.RASTER, 4, 6, 9, of_turn) for of_turn in (0, turn))
    assert np.array_equal(moved, (first + later) % first.size)


@pytest.mark.parametrize("walk", Walk)
def test_frames_of_one_column_are_walked_through(walk: Walk) -> None:
    for turn in range(TURNS):
        assert sorted(walk_ranks(walk, 3, 5, 1, turn).ravel()) == list(range(15))


def test_unmeasured_heads_take_cubes_rows_cubes() -> None:
    walks = [unmeasured_walk(turn) for turn in range(TURNS)]
    assert walks == [Walk.CUBES, Walk.RASTER, Walk.CUBES]
