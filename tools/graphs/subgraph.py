# SPDX-License-Identifier: Apache-2.0
"""Several nodes as one, and the blueprints of subgraphs/ that hold one each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .graph import drawn_groups, drawn_nodes, identity, links_of, numbers, own_pack
from .layout import TITLE, Item, Node, Placed, place
from .node_types import NodeType, Socket

#: What the frontend calls the two ends of a subgraph, and pixels between them and its nodes.
INPUTS, OUTPUTS, BESIDE = -10, -20, 60
WIDTH, ROW = 140, 20


@dataclass(frozen=True)
class Face:
    """An input of the one node.

    Attributes:
        label: its name there.
        feeds: nodes within and their inputs or widgets.
        value: of the widget that it is; none for a link's.
    """

    label: str
    kind: str
    feeds: tuple[tuple[str, str], ...]
    value: Any = None


@dataclass(frozen=True)
class Subgraph:
    """Nodes within one.

    Attributes:
        name: of the blueprint, or title.
        about: what it does, for the list of blueprints.
        item: its nodes.
        faces: its inputs.
        outputs: kind -> the node within that gives it.
        height: pixels that the one node takes.
    """

    name: str
    about: str
    item: Item
    faces: tuple[Face, ...]
    outputs: Mapping[str, str]
    height: int

    @property
    def id(self) -> str:
        return identity(self.name)

    @property
    def type(self) -> NodeType:
        faces = tuple(
            Socket(each.label, each.kind, widget=each.value is not None) for each in self.faces
        )
        outputs = tuple(Socket(kind, kind) for kind in self.outputs)
        return NodeType(faces, outputs, "", self.height)

    def definition(self) -> dict[str, Any]:
        placed, ends = list(place(self.item)), self.type
        nodes = [self._fed(each.item) for each in placed if isinstance(each.item, Node)]
        placed = [
            replace(each, item=self._fed(each.item)) if isinstance(each.item, Node) else each
            for each in placed
        ]
        faces = Node("faces", "", own_type=NodeType((), ends.inputs, "", 0))
        given = Node("given", "", (), self.outputs, own_type=NodeType(ends.outputs, (), "", 0))
        ids = numbers(nodes)
        links = links_of([*nodes, faces, given], ids | {"faces": INPUTS, "given": OUTPUTS})
        return {
            "id": self.id,
            "version": 1,
            "state": {
                "lastGroupId": len(drawn_groups(placed)),
                "lastNodeId": len(ids),
                "lastLinkId": len(links),
                "lastRerouteId": 0,
            },
            "revision": 0,
            "config": {},
            "name": self.name,
            "inputNode": {"id": INPUTS, "bounding": _beside(placed, len(self.faces), False)},
            "outputNode": {"id": OUTPUTS, "bounding": _beside(placed, len(self.outputs), True)},
            "inputs": self._ends(ends.inputs, links, 1, INPUTS),
            "outputs": self._ends(ends.outputs, links, 3, OUTPUTS),
            "widgets": [],
            "nodes": drawn_nodes(placed, ids, links),
            "groups": drawn_groups(placed),
            "links": [dict(zip(_LINK, link, strict=True)) for link in links],
            "extra": {},
            "category": "Video generation and editing/Text to video",
            "description": self.about,
        }

    def _fed(self, node: Node) -> Node:
        fed = {
            name: f"faces.{face.label}"
            for face in self.faces
            for target, name in face.feeds
            if target == node.name
        }
        return replace(node, inputs={**node.inputs, **fed})

    def _ends(
        self, sockets: tuple[Socket, ...], links: list[list[Any]], end: int, node: int
    ) -> list[dict[str, Any]]:
        """Sockets of one end; `end` is where a link's row has that end's id."""
        return [
            {
                "id": identity(f"{self.name}/{node}/{socket.name}"),
                "name": socket.name,
                "type": socket.kind,
                "linkIds": [link[0] for link in links if (link[end], link[end + 1]) == (node, n)],
            }
            for n, socket in enumerate(sockets)
        ]

    def node(self, name: str, inputs: Mapping[str, str]) -> Node:
        """The one node. inputs: as of `Node`."""
        values = tuple(face.value for face in self.faces if face.value is not None)
        return Node(name, self.id, values, inputs, self.name, own_type=self.type)

    def blueprint(self) -> dict[str, Any]:
        """A graph of the one node alone."""
        node = {
            "id": 1,
            "type": self.id,
            "pos": [0, TITLE],
            "size": [400, self.height],
            "flags": {},
            "order": 0,
            "mode": 0,
            "inputs": [
                {
                    "name": face.label,
                    "type": face.kind,
                    "widget": {"name": face.label},
                    "link": None,
                }
                for face in self.faces
            ],
            "outputs": [{"name": kind, "type": kind, "links": None} for kind in self.outputs],
            "properties": own_pack(),
            "widgets_values": [face.value for face in self.faces],
            "title": self.name,
        }
        return {
            "id": identity(f"{self.name}/blueprint"),
            "revision": 0,
            "last_node_id": 1,
            "last_link_id": 0,
            "nodes": [node],
            "links": [],
            "groups": [],
            "definitions": {"subgraphs": [self.definition()]},
            "config": {},
            "extra": {},
            "version": 0.4,
        }


_LINK = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")


def _beside(placed: list[Placed], sockets: int, right: bool) -> list[int]:
    """Box of an end of a subgraph: left or right of its nodes."""
    edge = max(x + w for x, _, w, _ in (each.box for each in placed))
    x = edge + BESIDE if right else -WIDTH - BESIDE
    return [x, 0, WIDTH, ROW * (sockets + 2)]
