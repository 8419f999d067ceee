# SPDX-License-Identifier: Apache-2.0
"""2^x in fixed point, as the sm_90a attend kernel computes most of its P before rounding to E4M3.

x is rounded to 64ths of an octave. Between two powers of two a straight line through both stands
for 2^x, and is too large. Half an octave on, the line errs otherwise; so the mean of both is taken,
the second shrunk by 2^-1/2, and a shift of x takes its mean error away. Over an octave the mean
error before E4M3 is 0.003 %, the rms error 0.55 %; next to E4M3's own rounding that is small
(docs/experiments.md, Error of P in fixed point).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.blocks import KEY_BLOCK

#: Bounds of the relative error before E4M3.
LOW, HIGH = -0.0154, 0.0110

_STEPS = 64  # an octave
SHIFT = 13.942620  # of x; makes the steps of all that E4M3 can hold positive
_SCALE = 2.0**-15  # of a line, where half precision begins: the sum of two is 2^-14 2^(x + SHIFT)
_ROOT_HALF = 0.70703125  # 2^-.5 in half precision

_TILE = 8  # neighbouring keys
#: Tiles of each 64 keys that are computed so, a bit each; of the others 2^x itself is rounded.
FIXED_TILES = 0x5B


def fixed_exp2(x: Tensor) -> Tensor:
    """About 2^x in half precision, 0 or less than 2^-13 where 2^x is below that; x up to 10."""
    steps = (_STEPS * (x + SHIFT)).round().clamp(min=0)
    return (_line(steps + _STEPS / 2) * _ROOT_HALF + _line(steps)).half()


def is_fixed(keys: int, device: torch.device) -> Tensor:
    """(keys,) bool: whether P of a key of a step, in order, is computed in fixed point."""
    tile = torch.arange(keys, device=device) % KEY_BLOCK // _TILE
    return (FIXED_TILES >> tile & 1).bool()


def _line(steps: Tensor) -> Tensor:
    octave = (steps / _STEPS).floor()
    return _SCALE * torch.exp2(octave) * (1 + steps / _STEPS - octave)
