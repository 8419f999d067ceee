# SPDX-License-Identifier: Apache-2.0
"""Letters of 3 x 5 points for the report's picture, so that it needs no font and no library."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = """
A .#. #.# ### #.# #.#
B ##. #.# ##. #.# ##.
C .## #.. #.. #.. .##
D ##. #.# #.# #.# ##.
E ### #.. ##. #.. ###
F ### #.. ##. #.. #..
G .## #.. #.# #.# .##
H #.# #.# ### #.# #.#
I ### .#. .#. .#. ###
J ..# ..# ..# #.# .#.
K #.# #.# ##. #.# #.#
L #.. #.. #.. #.. ###
M #.# ### ### #.# #.#
N ##. #.# #.# #.# #.#
O .#. #.# #.# #.# .#.
P ##. #.# ##. #.. #..
Q .#. #.# #.# .## ..#
R ##. #.# ##. #.# #.#
S .## #.. .#. ..# ##.
T ### .#. .#. .#. .#.
U #.# #.# #.# #.# .##
V #.# #.# #.# .#. .#.
W #.# #.# ### ### #.#
X #.# #.# .#. #.# #.#
Y #.# #.# .#. .#. .#.
Z ### ..# .#. #.. ###
0 ### #.# #.# #.# ###
1 .#. ##. .#. .#. ###
2 ##. ..# .#. #.. ###
3 ##. ..# .#. ..# ##.
4 #.# #.# ### ..# ..#
5 ### #.. ##. ..# ##.
6 .## #.. ### #.# ###
7 ### ..# .#. .#. .#.
8 ### #.# ### #.# ###
9 ### #.# ### ..# ##.
. ... ... ... ... .#.
, ... ... ... .#. #..
% #.# ..# .#. #.. #.#
"""

HEIGHT = 5
_GLYPHS = {
    line[0]: torch.tensor([[point == "#" for point in row] for row in line[2:].split()])
    for line in _ROWS.strip().splitlines()
}
_BLANK = torch.zeros(HEIGHT, 3, dtype=torch.bool)


def written(text: str, zoom: int = 2) -> Tensor:
    """(5 * zoom, 4 * zoom * letters) bool: the text in capitals; characters without a glyph are
    blank."""
    gap = torch.zeros(HEIGHT, 1, dtype=torch.bool)
    letters = [part for letter in text.upper() for part in (_GLYPHS.get(letter, _BLANK), gap)]
    points = torch.cat(letters or [gap], 1)
    return points.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)
