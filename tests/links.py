# SPDX-License-Identifier: Apache-2.0
"""Links between nodes as ComfyUI's frontend draws them: where they pass behind a node.

Points are (x, y) and boxes (left, top, right, bottom), in pixels of the canvas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Point = tuple[float, float]
#: What the frontend lets a curve leave a socket with: a share of the distance, and at least pixels.
REACH, LEAST_REACH = 0.25, 30.0
#: Points of a curve that are looked at.
POINTS = 200
#: Pixels by which a curve may touch a node: nobody sees that.
TOUCH = 2.0


@dataclass(frozen=True)
class Link:
    """A link by the names of the nodes at its ends."""

    source: str
    target: str
    start: Point
    end: Point

    def curve(self) -> Iterator[Point]:
        """Points of the cubic curve between its ends, which leaves them horizontally."""
        (x, y), (u, v) = self.start, self.end
        reach = max(LEAST_REACH, REACH * math.dist(self.start, self.end))
        for step in range(1, POINTS):
            t = step / POINTS
            a, b, c, d = (1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3
            yield a * x + b * (x + reach) + c * (u - reach) + d * u, (a + b) * y + (c + d) * v

    def passes_behind(self, box: Sequence[float]) -> bool:
        left, top, right, bottom = box
        return any(
            left + TOUCH < x < right - TOUCH and top + TOUCH < y < bottom - TOUCH
            for x, y in self.curve()
        )


def hidden_links(
    links: Iterable[Link], boxes: Mapping[str, Sequence[float]]
) -> list[tuple[str, str, str]]:
    """Source, target, and a third node that the link passes behind."""
    return [
        (link.source, link.target, name)
        for link in links
        for name, box in boxes.items()
        if name not in (link.source, link.target) and link.passes_behind(box)
    ]
