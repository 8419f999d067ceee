# SPDX-License-Identifier: Apache-2.0
"""Letters for pictures and figures, 5 x 7 points each, so that they need no font and no library."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH, HEIGHT = 5, 7

#: Strips of characters: a line that names them, then HEIGHT lines of points.
_STRIPS = """
A     B     C     D     E     F     G     H     I     J
.###. ####. .###. ####. ##### ##### .###. #...# .###. ..###
#...# #...# #...# #...# #.... #.... #...# #...# ..#.. ...#.
#...# #...# #.... #...# #.... #.... #.... #...# ..#.. ...#.
##### ####. #.... #...# ####. ####. #.### ##### ..#.. ...#.
#...# #...# #.... #...# #.... #.... #...# #...# ..#.. ...#.
#...# #...# #...# #...# #.... #.... #...# #...# ..#.. #..#.
#...# ####. .###. ####. ##### #.... .###. #...# .###. .##..

K     L     M     N     O     P     Q     R     S     T
#...# #.... #...# #...# .###. ####. .###. ####. .#### #####
#..#. #.... ##.## ##..# #...# #...# #...# #...# #.... ..#..
#.#.. #.... #.#.# ##..# #...# #...# #...# #...# #.... ..#..
##... #.... #.#.# #.#.# #...# ####. #...# ####. .###. ..#..
#.#.. #.... #...# #..## #...# #.... #.#.# #.#.. ....# ..#..
#..#. #.... #...# #..## #...# #.... #..#. #..#. ....# ..#..
#...# ##### #...# #...# .###. #.... .##.# #...# ####. ..#..

U     V     W     X     Y     Z     0     1     2     3
#...# #...# #...# #...# #...# ##### .###. ..#.. .###. ####.
#...# #...# #...# #...# #...# ....# #...# .##.. #...# ....#
#...# #...# #...# .#.#. .#.#. ...#. #..## ..#.. ....# ....#
#...# #...# #.#.# ..#.. ..#.. ..#.. #.#.# ..#.. ...#. .###.
#...# #...# #.#.# .#.#. ..#.. .#... ##..# ..#.. ..#.. ....#
#...# .#.#. ##.## #...# ..#.. #.... #...# ..#.. .#... ....#
.###. ..#.. #...# #...# ..#.. ##### .###. .###. ##### ####.

4     5     6     7     8     9     .     ,     -     %
...#. ##### .###. ##### .###. .###. ..... ..... ..... ##..#
..##. #.... #.... ....# #...# #...# ..... ..... ..... ##..#
.#.#. ####. #.... ...#. #...# #...# ..... ..... ..... ...#.
#..#. ....# ####. ...#. .###. .#### ..... ..... .###. ..#..
##### ....# #...# ..#.. #...# ....# ..... ..... ..... .#...
...#. #...# #...# ..#.. #...# ....# .##.. ..#.. ..... #..##
...#. .###. .###. ..#.. .###. .###. .##.. .#... ..... #..##
"""


def _read(strips: str) -> dict[str, Tensor]:
    glyphs = {" ": torch.zeros(HEIGHT, WIDTH, dtype=torch.bool, device="cpu")}
    for strip in strips.strip().split("\n\n"):
        names, *lines = (line.split() for line in strip.splitlines())
        for name, points in zip(names, zip(*lines, strict=True), strict=True):
            inked = [[point == "#" for point in line] for line in points]
            glyphs[name] = torch.tensor(inked, device="cpu")
    return glyphs


GLYPHS = _read(_STRIPS)


def write(text: str, zoom: int = 1) -> Tensor:
    """(zoom * 7, width) bool: the text in capitals, a point between letters. A character without a
    glyph, as names of files may have, is left blank."""
    gap = torch.zeros(HEIGHT, 1, dtype=torch.bool, device="cpu")
    parts = [part for letter in text.upper() for part in (_glyph(letter), gap)]
    points = torch.cat(parts[:-1] or [gap], 1)
    return points.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)


def _glyph(letter: str) -> Tensor:
    return GLYPHS.get(letter, GLYPHS[" "])
