# SPDX-License-Identifier: Apache-2.0
"""Ways through a token grid. Every 64 tokens of one share a key block, so that a head whose
attention has the shape of those blocks keeps few of them.

Each walk comes in turns, whose blocks have about the same shape and other borders. Sampling steps
take them in turn: what a head drops in one step it may keep in the next, so that its errors add up
less.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from .blocks import KEY_BLOCK
from .cubes import cube_ranks

#: Of every walk. Clips of the small video DiT come .5 dB closer to dense ones with three turns than
#: with one, and .35 dB with two (six clips at 10 and 20 % density, H200).
TURNS = 3


class Walk(enum.IntEnum):
    """Blocks of which shape a walk makes. Of the heads of a small trained video DiT 37 take CUBES
    in the first sparse step and 27 RASTER, halfway 28 and 36 (four clips at 20 % density, H200)."""

    CUBES = 0
    """About 4 frames x 4 x 4."""
    FRAMES = 1
    """About 8 x 8 in one frame, for heads that look within a frame."""
    RASTER = 2
    """Rows of a frame, for heads that look along rows."""


def unmeasured_walk(turn: int) -> Walk:
    """Of heads that nobody measured: rows in the second turn, cubes in the others.

    That brings clips of the small video DiT .9, 1.1 and 1.3 dB closer to dense ones at 10, 20 and
    30 % density than cubes in all turns (four clips in ComfyUI, H200): steps that cut the clip in
    different ways drop different things. Rows in two or three turns bring another .1 to .5 dB; but
    on video through DINOv2 cubes leave two thirds to four fifths of the error that rows do, so they
    have the other turns.
    """
    return Walk.RASTER if turn == 1 else Walk.CUBES


def walks_of(frames: int) -> tuple[Walk, ...]:
    """Those that differ: in an image cubes lie in one frame."""
    return tuple(Walk) if frames > 1 else (Walk.CUBES, Walk.RASTER)


def walk_ranks(
    walk: Walk, frames: int, height: int, width: int, turn: int = 0
) -> NDArray[np.int32]:
    """(frames, height, width) int32: the place of each token in the walk, from 0.

    turn: cubes go along another axis; the others begin a third of a key block later, with the
    tokens that were last, or in an image every second time at the other end.
    """
    if walk is Walk.CUBES:
        return cube_ranks(frames, height, width, turn)
    if frames == 1:
        path = _path(walk, height, width)[None]
        return np.flip(path) if turn % 2 else path
    ranks = _frame_by_frame(walk, frames, height, width, meets=turn > 0)
    return (ranks + np.int32(turn * KEY_BLOCK // TURNS)) % np.int32(ranks.size)


def _frame_by_frame(
    walk: Walk, frames: int, height: int, width: int, meets: bool
) -> NDArray[np.int32]:
    """Forth in one frame and back in the next, so that neighbours in the walk lie close together.

    meets: the walk also ends in the place of a frame where it began.

    A query block that holds tokens of two places keeps what the mean of its queries asks for: the
    few of one place lose their neighbours. Where frames all ran forth, those at borders of frames
    made up to half of the error, and in turns the tokens that went from the end to the beginning
    up to three quarters (two heads each of layers 2 and 3 of the small video DiT, plain drop at 10
    to 15 % in float32: .028 .046 .124 .177 in turn 0, .062 .082 .151 .193 in turn 1; now .026 .037
    .096 .105 and .029 .038 .101 .110).
    """
    area = height * width
    forth = _path(walk, height, width)
    both = np.stack([forth, area - 1 - forth])
    ranks = both[np.arange(frames) % 2]
    if meets and frames % 2 and width > 1:
        half = width // 2
        back = area - 1 - _path(walk, height, width - half)
        ranks[-1] = np.concatenate([_path(walk, height, half), back], axis=1)
    return ranks + np.arange(frames, dtype=np.int32)[:, None, None] * np.int32(area)


def _path(walk: Walk, height: int, width: int) -> NDArray[np.int32]:
    """(height, width): through one frame."""
    if walk is Walk.FRAMES:
        return cube_ranks(1, height, width)[0]
    return np.arange(height * width, dtype=np.int32).reshape(height, width)
