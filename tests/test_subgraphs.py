# SPDX-License-Identifier: Apache-2.0
"""The blueprints in subgraphs/, checked without ComfyUI; and that the archive holds them.

tests/comfy/test_server.py asks a real server for them, and tests/comfy/test_browser.py
places them in the real frontend.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.test_workflows import MODEL_FILE

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(params=sorted((ROOT / "subgraphs").glob("*.json")), ids=lambda path: path.stem)
def blueprint(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(request.param.read_text(encoding="utf-8"))


@pytest.fixture
def inside(blueprint: dict[str, Any]) -> dict[str, Any]:
    (subgraph,) = blueprint["definitions"]["subgraphs"]
    (node,) = blueprint["nodes"]
    assert node["type"] == subgraph["id"]
    return subgraph


def test_links_agree_with_the_nodes(inside: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in inside["nodes"]}
    for link in inside["links"]:
        out = (
            inside["inputs"][link["origin_slot"]]
            if link["origin_id"] == inside["inputNode"]["id"]
            else nodes[link["origin_id"]]["outputs"][link["origin_slot"]]
        )
        into = (
            inside["outputs"][link["target_slot"]]
            if link["target_id"] == inside["outputNode"]["id"]
            else nodes[link["target_id"]]["inputs"][link["target_slot"]]
        )
        assert out["type"] == into["type"] == link["type"]
        assert link["id"] in out.get("links", out.get("linkIds"))
        assert into.get("link") == link["id"] or into.get("linkIds") == [link["id"]]


def test_the_face_shows_what_is_set_inside(
    blueprint: dict[str, Any], inside: dict[str, Any]
) -> None:
    (node,) = blueprint["nodes"]
    nodes = {each["id"]: each for each in inside["nodes"]}
    links = {link["id"]: link for link in inside["links"]}
    names = [socket["name"] for socket in node["inputs"]]
    assert names == [face["name"] for face in inside["inputs"]]
    assert {"prompt", "seed", "width", "height", "frames", "steps"} < set(names)
    for face, value in zip(inside["inputs"], node["widgets_values"], strict=True):
        assert face["linkIds"]
        for link in face["linkIds"]:
            assert value in nodes[links[link]["target_id"]]["widgets_values"], face["name"]


def test_every_file_can_be_had_and_chosen(
    blueprint: dict[str, Any], inside: dict[str, Any]
) -> None:
    linked = {m["name"] for node in inside["nodes"] for m in node["properties"].get("models", [])}
    (node,) = blueprint["nodes"]
    shown = [x for x in node["widgets_values"] if isinstance(x, str) and MODEL_FILE.search(x)]
    assert set(shown) == linked


def test_the_archive_holds_graphs_and_blueprints() -> None:
    lines = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    left_out = [line.strip("/") for line in lines if line and not line.startswith("#")]
    for folder in ("workflows", "subgraphs"):
        for path in (ROOT / folder).iterdir():
            name = path.relative_to(ROOT).as_posix()
            assert not any(fnmatch(name, pattern) or folder == pattern for pattern in left_out)
