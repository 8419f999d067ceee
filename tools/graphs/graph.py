# SPDX-License-Identifier: Apache-2.0
"""A graph as ComfyUI's frontend saves it (version 0.4), from its nodes at their places."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .layout import TITLE, Group, Item, Node, Placed, place
from .node_types import ABOUT_ATTENTION, NOTE, OURS, WIDGET_KINDS, Socket

COMFYUI = "0.33.0"
PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
GREEN = {"color": "#1f3d2b", "bgcolor": "#16301f"}
BROWN = {"color": "#432", "bgcolor": "#653"}
GROUP_COLOR = "#8fb4d0"


class Definition(Protocol):
    """A subgraph."""

    def definition(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Graph:
    """A shipped graph.

    Attributes:
        name: of its file, which the template browser shows as its title.
        model, task, size: what the picture says.
        item: its nodes.
        subgraphs: that nodes of it are.
    """

    name: str
    model: str
    task: str
    size: str
    item: Item
    subgraphs: tuple[Definition, ...] = ()

    @property
    def placed(self) -> list[Placed]:
        return list(place(self.item))

    @property
    def nodes(self) -> list[Node]:
        return [each.item for each in self.placed if isinstance(each.item, Node)]

    def json(self) -> dict[str, Any]:
        ids = numbers(self.nodes)
        links = links_of(self.nodes, ids)
        return {
            "id": identity(self.name),
            "revision": 0,
            "last_node_id": len(ids),
            "last_link_id": len(links),
            "nodes": drawn_nodes(self.placed, ids, links),
            "links": links,
            "groups": drawn_groups(self.placed),
            **self._definitions(),
            "config": {},
            "extra": {},
            "version": 0.4,
        }

    def _definitions(self) -> dict[str, Any]:
        if not self.subgraphs:
            return {}
        return {"definitions": {"subgraphs": [each.definition() for each in self.subgraphs]}}


def identity(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"sparge-attention/{name}"))


def numbers(nodes: list[Node]) -> dict[str, int]:
    """Name of a node -> its id."""
    return {node.name: number for number, node in enumerate(nodes, 1)}


def drawn_nodes(
    placed: list[Placed], ids: dict[str, int], links: list[list[Any]]
) -> list[dict[str, Any]]:
    order = _order(ids, links)
    return [
        _node(each.item, ids[each.item.name], order[ids[each.item.name]], each.box, links)
        for each in placed
        if isinstance(each.item, Node)
    ]


def drawn_groups(placed: list[Placed]) -> list[dict[str, Any]]:
    groups = [each for each in placed if isinstance(each.item, Group)]
    return [_group(number, each) for number, each in enumerate(groups, 1)]


def links_of(nodes: list[Node], ids: dict[str, int]) -> list[list[Any]]:
    """Rows of link, node and output it comes from, node and input it goes to, kind."""
    by_name = {node.name: node for node in nodes}
    rows: list[list[Any]] = []
    for node in nodes:
        slots = [socket.name for socket in sockets(node)]
        unknown = node.inputs.keys() - set(slots)
        assert not unknown, f"{node.name} has no input {unknown}"
        for slot, name in enumerate(slots):
            if name not in node.inputs:
                continue
            source, _, output = node.inputs[name].partition(".")
            outputs = by_name[source].type.outputs
            number = [each.name for each in outputs].index(output) if output else 0
            ends = [ids[source], number, ids[node.name], slot]
            rows.append([len(rows) + 1, *ends, outputs[number].kind])
    return rows


def sockets(node: Node) -> list[Socket]:
    """Inputs of the node's type, and widgets that a link feeds."""
    own = list(node.type.inputs)
    names = {socket.name for socket in own}
    fed = [name for name in node.inputs if name not in names]
    return own + [Socket(name, WIDGET_KINDS.get(name, "COMBO")) for name in fed]


def _order(ids: dict[str, int], links: list[list[Any]]) -> dict[int, int]:
    """Id of a node -> when it runs: after what feeds it."""
    depth = dict.fromkeys(ids.values(), 0)
    inside = [(link[1], link[3]) for link in links if depth.keys() >= {link[1], link[3]}]
    for _ in ids:
        for source, target in inside:
            depth[target] = max(depth[target], depth[source] + 1)
    return {node: number for number, node in enumerate(sorted(depth, key=lambda n: (depth[n], n)))}


def _node(
    node: Node, number: int, order: int, box: tuple[int, int, int, int], links: list[list[Any]]
) -> dict[str, Any]:
    x, y, width, height = box
    fed = {slot: link for link, _, _, target, slot, _ in links if target == number}
    inputs = []
    for slot, socket in enumerate(sockets(node)):
        entry: dict[str, Any] = {"name": socket.name, "type": socket.kind, "link": fed.get(slot)}
        if slot >= len(node.type.inputs) or socket.widget:
            entry["widget"] = {"name": socket.name}
        elif socket.optional:
            entry["shape"] = 7
        inputs.append(entry)
    outputs = [
        {
            "name": socket.name,
            "type": socket.kind,
            "links": [link for link, a, b, _, _, _ in links if (a, b) == (number, slot)],
        }
        for slot, socket in enumerate(node.type.outputs)
    ]
    made: dict[str, Any] = {
        "id": number,
        "type": node.kind,
        "pos": [x, y + TITLE],
        "size": [width, height - TITLE],
        "flags": {},
        "order": order,
        "mode": 0,
        "inputs": inputs,
        "outputs": outputs,
        "properties": _properties(node),
        "widgets_values": list(node.values),
    }
    if node.title:
        made["title"] = node.title
    return made | (GREEN if node.kind in ABOUT_ATTENTION else BROWN if node.kind == NOTE else {})


def _properties(node: Node) -> dict[str, Any]:
    """By them the Manager finds the node's pack, and the frontend missing models."""
    if node.kind == NOTE:
        return {}
    pack = (
        own_pack()
        if node.kind in OURS or node.own_type
        else {"cnr_id": "comfy-core", "ver": COMFYUI}
    )
    found: dict[str, Any] = {**pack, "Node name for S&R": node.kind}
    if node.models:
        found["models"] = [
            {"name": model.file, "url": model.url, "directory": model.folder}
            for model in node.models
        ]
    return found


def own_pack() -> dict[str, str]:
    return {"cnr_id": _of_project("name"), "ver": _of_project("version")}


def _of_project(key: str) -> str:
    found = re.search(rf'^{key} = "([^"]+)"$', PROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, key
    return found[1]


def _group(number: int, placed: Placed) -> dict[str, Any]:
    assert isinstance(placed.item, Group)
    return {
        "id": number,
        "title": placed.item.title,
        "bounding": list(placed.box),
        "color": GROUP_COLOR,
        "font_size": 24,
        "flags": {},
    }
