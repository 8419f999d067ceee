# SPDX-License-Identifier: Apache-2.0
"""The graphs in workflows/ and the blueprints in subgraphs/, checked without ComfyUI: whole,
consistent, and true to our node.

tests/comfy/test_browser.py opens the same graphs in the real frontend, and hands them to a real
server.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

from sparge.session import Settings

ROOT = Path(__file__).resolve().parents[1]
MODEL_FILE = re.compile(r"\.(safetensors|sft|ckpt|pt|pth|bin|gguf)$")

NOTE = "MarkdownNote"
LOADERS = ("UNETLoader", "SpargeCogVideoXLoad", "CheckpointLoaderSimple")
SAMPLERS = ("KSampler", "KSamplerAdvanced")
#: Folders of models/.
FOLDERS = (
    *("checkpoints", "diffusion_models", "latent_upscale_models", "loras", "text_encoders", "vae"),
)
#: Latent frames of that many frames, where it is not every fourth and the first.
LATENT_FRAMES: dict[str, Callable[[int], int]] = {
    "EmptyMochiLatentVideo": lambda frames: (frames - 1) // 6 + 1,
    "EmptyMiniMaxH3LatentAV": lambda frames: (frames - 5) // 17 * 5 + 2,
    "EmptyLTXVLatentVideo": lambda frames: (frames - 1) // 8 + 1,
}
#: Latents whose tokens are 32 pixels wide and high, not 16. LTX's are too, but its second pass has
#: twice the size of the latent.
COARSE = ("EmptyMiniMaxH3LatentAV",)


def project(key: str) -> str:
    # tomllib came with Python 3.11, and these two lines are all that is needed of it.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'^{key} = "([^"]+)"$', text, re.MULTILINE)
    assert found
    return found[1]


def our_widgets() -> dict[str, Any]:
    """Name -> default of each widget of any mode, in order: the fields of Settings."""
    return {each.name: each.default for each in fields(Settings)}


def new_node() -> dict[str, Any]:
    """Name -> value of what a node shows that is added now: of its mode, then of every mode."""
    defaults = our_widgets() | {"start_percent": 0.1}
    names = list(defaults)
    shown = ["quality", *names[names.index("start_percent") :]]
    return {"mode": "auto quality"} | {name: defaults[name] for name in shown}


@pytest.fixture(params=sorted((ROOT / "workflows").glob("*.json")), ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def graph(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def notes(graph: dict[str, Any]) -> str:
    return "\n".join(n["widgets_values"][0] for n in graph["nodes"] if n["type"] == NOTE)


def subgraphs(graph: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Subgraphs by id, which is the type of the node that each is."""
    return {each["id"]: each for each in graph.get("definitions", {}).get("subgraphs", [])}


@pytest.fixture
def nodes(graph: dict[str, Any]) -> list[dict[str, Any]]:
    """Nodes that a server runs."""
    inner = subgraphs(graph)
    every = itertools.chain(graph["nodes"], *(each["nodes"] for each in inner.values()))
    return [node for node in every if node["type"] not in (NOTE, *inner)]


def test_links_agree_with_the_nodes(graph: dict[str, Any]) -> None:
    assert graph["version"] == 0.4
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"])
    assert graph["last_node_id"] == max(nodes)
    assert graph["last_link_id"] == max(link[0] for link in graph["links"])
    fed = set()
    for identity, source, output, target, slot, kind in graph["links"]:
        out = nodes[source]["outputs"][output]
        into = nodes[target]["inputs"][slot]
        assert out["type"] == into["type"] == kind
        assert identity in out["links"] and into["link"] == identity
        assert nodes[source]["order"] < nodes[target]["order"]
        fed.add(identity)
    for slot in (slot for node in nodes.values() for slot in node["inputs"]):
        optional = slot.get("shape") == 7
        free = optional or "widget" in slot
        assert slot["link"] in fed or (free and slot["link"] is None), slot["name"]


def test_mochi_and_cogvideox_are_first_in_the_list() -> None:
    """The template browser shows file names, which every system can have."""
    names = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
    assert [name.split()[1] for name in names[:4]] == ["Mochi"] * 2 + ["CogVideoX"] * 2
    assert all(re.fullmatch(r"\d\d [\w .,-]+", name) for name in names)


def test_our_node_is_the_last_before_the_sampler(graph: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in graph["nodes"]}
    ours = [node for node in nodes.values() if node["type"] == "SpargeAttention"]
    loaders = [node for node in nodes.values() if node["type"] in LOADERS]
    assert len(ours) == len(loaders) and ours
    path = [
        (nodes[s]["type"], nodes[t]["type"]) for _, s, _, t, _, x in graph["links"] if x == "MODEL"
    ]
    for node in ours:
        assert node["mode"] == 0
        assert node["widgets_values"] == list(new_node().values())
    before = {source for source, target in path if target == "SpargeAttention"}
    after = [target for source, target in path if source == "SpargeAttention"]
    assert before <= {*LOADERS, "ModelSamplingSD3"}
    samplers = {*SAMPLERS, *subgraphs(graph)}
    assert sum(target in samplers for target in after) == max(len(ours), len(subgraphs(graph)))
    assert set(after) <= {*samplers, "SpargeAttentionReport"}


def test_the_report_hangs_beside_the_way_to_the_clip(graph: dict[str, Any]) -> None:
    """Whoever deletes it still has the clip."""
    types = {node["id"]: node["type"] for node in graph["nodes"]}
    links = {(types[s], types[t], kind) for _, s, _, t, _, kind in graph["links"]}
    assert not any(source == "SpargeAttentionReport" for source, _, _ in links)
    decoded = {s for s, t, _ in links if t.startswith("VAEDecode")}
    assert decoded - {"VAELoader"} <= set(SAMPLERS)
    if "SpargeAttentionReport" in types.values():
        assert links >= {
            ("SpargeAttention", "SpargeAttentionReport", "MODEL"),
            ("KSampler", "SpargeAttentionReport", "LATENT"),
        }


def test_the_manager_can_find_every_node(nodes: list[dict[str, Any]]) -> None:
    for node in nodes:
        properties = node["properties"]
        assert properties["Node name for S&R"] == node["type"]
        found = properties["cnr_id"], properties["ver"]
        if node["type"].startswith("Sparge"):
            assert found == (project("name"), project("version"))
        else:
            assert found[0] == "comfy-core" and re.fullmatch(r"\d+\.\d+\.\d+", found[1])


def test_every_model_can_be_had(nodes: list[dict[str, Any]], notes: str) -> None:
    """A model has a download link; of several files, the note has the others."""
    for node in nodes:
        linked = {model["name"]: model for model in node["properties"].get("models", [])}
        files = [x for x in node["widgets_values"] if isinstance(x, str) and MODEL_FILE.search(x)]
        for value in files:
            model = linked.pop(value)
            if several := re.search(r"-00001-of-(\d{5})\.", model["url"]):
                number = int(several[1])
                urls = [model["url"].replace("00001", f"{n + 1:05}", 1) for n in range(number)]
                assert all(f"]({url})" in notes for url in urls)
            assert model["directory"] in FOLDERS
            saved_as = unquote(urlparse(model["url"]).path).split("/")[-1]
            assert saved_as == value or f"models/vae/{value}" in notes
        assert not linked, "a link for a file that no widget names"


def test_downloads_and_the_size_of_the_picture(path: Path) -> None:
    for url in re.findall(r"https?://[^\s\")\\]+", path.read_text(encoding="utf-8")):
        file = r"https://huggingface\.co/[^/]+/[^/]+/resolve/main/.+\.safetensors"
        assert re.fullmatch(file, url), url
    assert 0 < path.with_suffix(".jpg").stat().st_size < 200_000


def test_note_tells_what_to_expect(nodes: list[dict[str, Any]], notes: str) -> None:
    """The token count in the note is that of the latent in the graph; tiles fit their overlap."""
    widgets = {node["type"]: node["widgets_values"] for node in nodes}
    (latent,) = (each for each in widgets if each.startswith("Empty") or each == "WanImageToVideo")
    width, height, *frames = widgets[latent][: 2 if latent == "EmptySD3LatentImage" else 3]
    time = LATENT_FRAMES.get(latent, lambda frames: (frames - 1) // 4 + 1)(*frames or [1])
    if "CogVideoX 1.5" in notes.splitlines()[0]:  # it joins two latent frames in a token
        time = (time + 1) // 2
    side = 32 if latent in COARSE else 16
    kind = "video" if frames else "image"
    assert f"{time * (height // side) * (width // side):,} {kind} tokens" in notes
    assert "`" not in notes, "Nodes 2.0 shows code in blue on brown"
    if "VAEDecodeTiled" in widgets:
        tile, overlap, frames, frame_overlap = widgets["VAEDecodeTiled"]
        assert tile >= 4 * overlap and frames >= 2 * frame_overlap


@pytest.fixture(params=sorted((ROOT / "subgraphs").glob("*.json")), ids=lambda path: path.stem)
def blueprint(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(request.param.read_text(encoding="utf-8"))


@pytest.fixture
def inside(blueprint: dict[str, Any]) -> dict[str, Any]:
    (subgraph,) = blueprint["definitions"]["subgraphs"]
    (node,) = blueprint["nodes"]
    assert node["type"] == subgraph["id"]
    return subgraph


def test_links_inside_a_blueprint_agree_with_the_nodes(inside: dict[str, Any]) -> None:
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


def test_every_file_of_a_blueprint_can_be_had_and_chosen(
    blueprint: dict[str, Any], inside: dict[str, Any]
) -> None:
    linked = {m["name"] for node in inside["nodes"] for m in node["properties"].get("models", [])}
    (node,) = blueprint["nodes"]
    shown = [x for x in node["widgets_values"] if isinstance(x, str) and MODEL_FILE.search(x)]
    assert set(shown) == linked
