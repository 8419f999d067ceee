# SPDX-License-Identifier: Apache-2.0
"""The graphs in workflows/ against a real server: what a user drags in must be accepted as it is;
and the blueprints in subgraphs/, which it offers.

Only the validation of /prompt is of interest. The model files are empty placeholders, so that the
names in the loaders are among their options; the run that follows is thrown out of the queue.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

PACK = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((PACK / "workflows").glob("*.json"))
SUBGRAPHS = sorted((PACK / "subgraphs").glob("*.json"))
FRONTEND_ONLY = {"MarkdownNote"}
#: What the frontend calls the two ends of a subgraph.
INPUTS, OUTPUTS = -10, -20
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"}


def graph(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def is_widget(kind: Any) -> bool:
    """An input that takes several kinds, such as "FLOAT,INT", is shown as the first."""
    return isinstance(kind, list) or kind.split(",")[0] in WIDGETS


def widget_inputs(
    inputs: dict[str, Any], values: Iterator[Any], prefix: str = ""
) -> dict[str, Any]:
    """Names the values of widgets_values as the frontend does, sub-widgets in place."""
    named = {}
    for group in ("required", "optional"):
        for name, (kind, *options) in inputs.get(group, {}).items():
            settings = options[0] if options else {}
            if not is_widget(kind) or settings.get("hidden"):
                continue
            # A widget that was appended since the graph was saved gets its default.
            value = next(values, settings.get("default"))
            named[prefix + name] = value
            if settings.get("control_after_generate") or settings.get("image_upload"):
                next(values)
            if kind == "COMFY_DYNAMICCOMBO_V3":
                chosen = next(o for o in settings["options"] if o["key"] == value)
                named |= widget_inputs(chosen["inputs"], values, f"{prefix}{name}.")
    return named


def subgraphs(ui: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Subgraphs by id, which is the type of the node that each is."""
    return {each["id"]: each for each in ui.get("definitions", {}).get("subgraphs", [])}


def to_prompt(ui: dict[str, Any], object_info: dict[str, Any]) -> dict[str, Any]:
    """The API form of a UI graph that has no muted nodes, and no subgraph in another."""
    inner, types = subgraphs(ui), {node["id"]: node["type"] for node in ui["nodes"]}

    def source(node: int, slot: int) -> list[Any]:
        if types[node] not in inner:
            return [str(node), slot]
        (link,) = (
            link
            for link in inner[types[node]]["links"]
            if (link["target_id"], link["target_slot"]) == (OUTPUTS, slot)
        )
        return [f"{node}:{link['origin_id']}", link["origin_slot"]]

    links = {link[0]: source(link[1], link[2]) for link in ui["links"]}
    prompt = {}
    for node in ui["nodes"]:
        if node["type"] in inner:
            prompt |= _inside(node, inner[node["type"]], links, object_info)
        elif node["type"] not in FRONTEND_ONLY:
            prompt[str(node["id"])] = _for_prompt(node, links, object_info)
    return prompt


def _inside(
    parent: dict[str, Any],
    subgraph: dict[str, Any],
    links: dict[int, Any],
    object_info: dict[str, Any],
) -> dict[str, Any]:
    values = iter(parent["widgets_values"])
    faces = [links[i["link"]] if i["link"] else next(values) for i in parent["inputs"]]
    within = {
        link["id"]: faces[link["origin_slot"]]
        if link["origin_id"] == INPUTS
        else [f"{parent['id']}:{link['origin_id']}", link["origin_slot"]]
        for link in subgraph["links"]
    }
    return {
        f"{parent['id']}:{node['id']}": _for_prompt(node, within, object_info)
        for node in subgraph["nodes"]
    }


def _for_prompt(
    node: dict[str, Any], links: dict[int, Any], object_info: dict[str, Any]
) -> dict[str, Any]:
    values = iter(node["widgets_values"])
    inputs = widget_inputs(object_info[node["type"]]["input"], values)
    assert next(values, None) is None, f"{node['type']} has widget values left over"
    inputs |= {i["name"]: links[i["link"]] for i in node["inputs"] if i["link"]}
    return {"class_type": node["type"], "inputs": inputs}


def put_placeholders(base: Path) -> None:
    """Empty files under the names that the graphs load."""
    for path in WORKFLOWS:
        ui = graph(path)
        for node in chain(ui["nodes"], *(each["nodes"] for each in subgraphs(ui).values())):
            for model in node["properties"].get("models", []):
                _put(base / "models" / model["directory"] / model["name"])
            if node["type"] == "LoadImage":
                _put(base / "input" / node["widgets_values"][0])


def _put(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


@pytest.fixture(scope="module")
def server(start_server: Any, base_directory: Path, comfyui_env: dict[str, str]) -> Any:
    put_placeholders(base_directory)
    return start_server(base_directory, comfyui_env)


@pytest.fixture(scope="module")
def object_info(server: Any) -> dict[str, Any]:
    return server.get("/object_info")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_server_accepts_the_graph(path: Path, server: Any, object_info: dict[str, Any]) -> None:
    prompt = to_prompt(graph(path), object_info)
    status, answer = server.post("/prompt", {"prompt": prompt})
    server.post("/queue", {"clear": True})
    server.post("/interrupt", {})
    assert status == 200, json.dumps(answer, indent=1)
    assert answer["node_errors"] == {}


def test_a_wrong_graph_is_refused(server: Any, object_info: dict[str, Any]) -> None:
    """Shows that the test above can fail."""
    prompt = to_prompt(graph(WORKFLOWS[0]), object_info)
    sparge = next(n for n in prompt.values() if n["class_type"] == "SpargeAttention")
    assert sparge["inputs"]["mode.quality"] == "balanced"
    sparge["inputs"]["mode.quality"] = "best"
    status, answer = server.post("/prompt", {"prompt": prompt})
    assert status == 400
    assert [e["class_type"] for e in answer["node_errors"].values()] == ["SpargeAttention"]


def test_the_templates_are_served(server: Any, pack_folder: str) -> None:
    templates = server.get("/workflow_templates")
    assert set(templates[pack_folder]) == {path.stem for path in WORKFLOWS}
    for path in WORKFLOWS:
        thumbnail = quote(f"/api/workflow_templates/{pack_folder}/{path.stem}.jpg")
        with urllib.request.urlopen(server.url + thumbnail, timeout=60) as answer:
            assert answer.read() == path.with_suffix(".jpg").read_bytes()


def test_the_blueprints_are_served(server: Any, pack_folder: str) -> None:
    offered = server.get("/global_subgraphs")
    ours = {
        entry["name"]: key
        for key, entry in offered.items()
        if entry["info"]["node_pack"] == f"custom_nodes.{pack_folder}"
    }
    assert ours.keys() == {path.stem for path in SUBGRAPHS}
    for path in SUBGRAPHS:
        entry = server.get(f"/global_subgraphs/{ours[path.stem]}")
        assert json.loads(entry["data"]) == graph(path)
