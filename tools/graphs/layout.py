# SPDX-License-Identifier: Apache-2.0
"""Where nodes stand: rows, stacks and groups of them, sizes in pixels of the canvas.

Links run from left to right alone, so what feeds a node stands in a row before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlparse

from .node_types import NODE_TYPES, NodeType

TITLE = 30
"""Height of a node's title, which lies above its position."""
BELOW = 20
"""Pixels between items of a stack."""
BESIDE = 12
"""Pixels between groups of a row."""
FOR_LINKS = 20
"""Pixels between nodes of a row."""
MARGIN, HEADER = 10, 40
"""Pixels between a group's edge and its nodes: at the sides and below, and above."""


@dataclass(frozen=True)
class Model:
    """A file to download into a folder of models/; name is for one that is saved under another."""

    url: str
    folder: str
    name: str = ""

    @property
    def file(self) -> str:
        return self.name or unquote(urlparse(self.url).path).rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        name: what others call it in their inputs.
        inputs: name of an input (or of a widget that a link feeds) -> name of the node that feeds
            it, with `.output` where that has more than one.
        values: of its widgets.
        height: pixels, where its type's are not enough.
        models: the files that its values name, where they can be downloaded as they are.
        own_type: of a node of no kind that ComfyUI has: a subgraph.
    """

    name: str
    kind: str
    values: tuple[Any, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    height: int = 0
    models: tuple[Model, ...] = ()
    own_type: NodeType | None = None

    @property
    def type(self) -> NodeType:
        return self.own_type or NODE_TYPES[self.kind]


@dataclass(frozen=True)
class Stack:
    """Items below each other, all as wide.

    Attributes:
        top: pixels above them that stay free, for links to pass.
        gap: pixels between them.
    """

    width: int
    items: tuple[Item, ...]
    top: int = 0
    gap: int = BELOW


@dataclass(frozen=True)
class Row:
    """Items beside each other; nodes stand in stacks."""

    items: tuple[Stack | Row | Group, ...]
    gap: int = BESIDE


@dataclass(frozen=True)
class Group:
    """A titled box around an item."""

    title: str
    item: Stack | Row


@dataclass(frozen=True)
class Board:
    """Items at places of their own: x, y and the item."""

    items: tuple[tuple[int, int, Stack | Row | Group], ...]


Item = Node | Stack | Row | Group | Board


@dataclass(frozen=True)
class Placed:
    """An item at its place: x, y, width and height of what it covers, a node's title included."""

    item: Node | Group
    box: tuple[int, int, int, int]


def place(item: Item, x: int = 0, y: int = 0, width: int = 0) -> Iterator[Placed]:
    """Yields groups and nodes; a node takes the width of its stack."""
    if isinstance(item, Node):
        yield Placed(item, (x, y, width, TITLE + (item.height or item.type.height)))
    elif isinstance(item, Stack):
        y += item.top
        for each in item.items:
            yield from place(each, x, y, item.width)
            y += extent(each, item.width)[1] + item.gap
    elif isinstance(item, Row):
        for each in item.items:
            yield from place(each, x, y)
            x += extent(each)[0] + item.gap
    elif isinstance(item, Board):
        for right, down, each in item.items:
            yield from place(each, x + right, y + down)
    else:
        yield Placed(item, (x, y, *extent(item)))
        yield from place(item.item, x + MARGIN, y + HEADER)


def extent(item: Item, width: int = 0) -> tuple[int, int]:
    """Width and height that an item takes."""
    inside = [
        placed.box for placed in place(item.item if isinstance(item, Group) else item, width=width)
    ]
    wide = max(x + w for x, _, w, _ in inside)
    high = max(y + h for _, y, _, h in inside)
    if isinstance(item, Group):
        return wide + 2 * MARGIN, high + HEADER + MARGIN
    return wide, high
