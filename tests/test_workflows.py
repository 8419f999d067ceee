# SPDX-License-Identifier: Apache-2.0
"""The graphs in workflows/, checked without ComfyUI: whole, consistent, and true to our node.

tests/comfy/test_workflows_server.py hands the same graphs to a real server.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODEL_FILE = re.compile(r"\.(safetensors|sft|ckpt|pt|pth|bin|gguf)$")
NOTE = "MarkdownNote"

#: Widgets of nodes in use, in the order ComfyUI v0.33 shows them, by the first letter of the type.
WIDGETS = {
    "UNETLoader": "ss", "CLIPLoader": "sss", "VAELoader": "s", "CLIPTextEncode": "s",
    "EmptyMochiLatentVideo": "iiii", "EmptyHunyuanLatentVideo": "iiii", "KSampler": "isifssf",
    "VAEDecodeTiled": "iiii", "CreateVideo": "fi", "SaveVideo": "sss", "PreviewImage": "",
    NOTE: "s", "SpargeAttentionReport": "s",
}  # fmt: skip
TYPES: dict[str, Any] = {"s": str, "i": int, "f": (int, float), "b": bool}


def project(key: str) -> str:
    # tomllib came with Python 3.11, and these two lines are all that is needed of it.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'^{key} = "([^"]+)"$', text, re.MULTILINE)
    assert found
    return found[1]


def our_widgets() -> dict[str, Any]:
    """Name -> default of each widget of any mode, in order: the fields of nodes/settings.py."""
    text = (ROOT / "nodes" / "settings.py").read_text(encoding="utf-8")
    constants = dict(re.findall(r'^(\w+) = ("[^"]*")$', text, re.MULTILINE))
    fields = re.findall(r"^    (\w+): (?:str|int|float|bool) = (.+)$", text, re.MULTILINE)
    return {name: ast.literal_eval(constants.get(value, value)) for name, value in fields}


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


@pytest.fixture
def nodes(graph: dict[str, Any]) -> list[dict[str, Any]]:
    """Nodes that a server runs."""
    return [node for node in graph["nodes"] if node["type"] != NOTE]


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
        assert slot["link"] in fed or (optional and slot["link"] is None), slot["name"]


def test_widgets_have_the_right_number_and_kind(graph: dict[str, Any]) -> None:
    ours = "".join(type(value).__name__[0] for value in new_node().values())
    kinds = WIDGETS | {"SpargeAttention": ours}
    for node in graph["nodes"]:
        assert node["type"] in kinds, f"{node['type']} is neither core's nor ours"
        for value, kind in zip(node["widgets_values"], kinds[node["type"]], strict=True):
            assert isinstance(value, TYPES[kind]), node["type"]


def test_our_node_is_between_the_loader_and_the_sampler(graph: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in graph["nodes"]}
    (ours,) = (node for node in nodes.values() if node["type"] == "SpargeAttention")
    assert ours["mode"] == 0
    assert ours["widgets_values"] == list(new_node().values())
    path = [
        (nodes[s]["type"], nodes[t]["type"]) for _, s, _, t, _, x in graph["links"] if x == "MODEL"
    ]
    assert path[:2] == [("UNETLoader", "SpargeAttention"), ("SpargeAttention", "KSampler")]
    assert path[2:] in ([], [("SpargeAttention", "SpargeAttentionReport")])


def test_a_mochi_graph_shows_the_report() -> None:
    """After the sampler, and seen before the decoder's work."""
    graph = json.loads((ROOT / "workflows" / "mochi_t2v_848x480_85f.json").read_text("utf-8"))
    types = {node["id"]: node["type"] for node in graph["nodes"]}
    links = {(types[s], types[t], kind) for _, s, _, t, _, kind in graph["links"]}
    assert links >= {
        ("SpargeAttention", "SpargeAttentionReport", "MODEL"),
        ("KSampler", "SpargeAttentionReport", "LATENT"),
        ("SpargeAttentionReport", "VAEDecodeTiled", "LATENT"),
        ("SpargeAttentionReport", "PreviewImage", "IMAGE"),
    }
    assert ("KSampler", "VAEDecodeTiled", "LATENT") not in links


def test_the_manager_can_find_every_node(nodes: list[dict[str, Any]]) -> None:
    for node in nodes:
        properties = node["properties"]
        assert properties["Node name for S&R"] == node["type"]
        found = properties["cnr_id"], properties["ver"]
        if node["type"] in ("SpargeAttention", "SpargeAttentionReport"):
            assert found == (project("name"), project("version"))
        else:
            assert found[0] == "comfy-core" and re.fullmatch(r"\d+\.\d+\.\d+", found[1])


def test_every_model_can_be_had(nodes: list[dict[str, Any]], notes: str) -> None:
    """A model has a download link, or the note says how it is made."""
    for node in nodes:
        linked = {model["name"]: model for model in node["properties"].get("models", [])}
        files = [x for x in node["widgets_values"] if isinstance(x, str) and MODEL_FILE.search(x)]
        for value in files:
            if value not in linked:
                assert f"--out COMFYUI/models/diffusion_models/{value}" in notes
                continue
            model = linked.pop(value)
            assert model["directory"] in ("diffusion_models", "text_encoders", "vae")
            saved_as = unquote(urlparse(model["url"]).path).split("/")[-1]
            assert saved_as == value or f"models/vae/{value}" in notes
        assert not linked, "a link for a file that no widget names"


def test_downloads_and_the_thumbnail(path: Path) -> None:
    for url in re.findall(r"https?://[^\s\")\\]+", path.read_text(encoding="utf-8")):
        file = r"https://huggingface\.co/[^/]+/[^/]+/resolve/main/.+\.safetensors"
        assert re.fullmatch(file, url), url
    picture = path.with_suffix(".jpg").read_bytes()
    assert picture[:3] == b"\xff\xd8\xff" and len(picture) < 200_000


def test_note_tells_what_to_expect(nodes: list[dict[str, Any]], notes: str) -> None:
    """The token count in the note is that of the latent in the graph; tiles fit their overlap."""
    widgets = {node["type"]: node["widgets_values"] for node in nodes}
    (latent,) = (each for each in widgets if each.startswith("Empty"))
    width, height, frames, _ = widgets[latent]
    time = (frames - 1) // (6 if latent == "EmptyMochiLatentVideo" else 4) + 1
    if "1.5" in widgets["UNETLoader"][0]:  # CogVideoX 1.5 joins two latent frames in a token
        time = (time + 1) // 2
    assert f"{time * (height // 16) * (width // 16):,} video tokens" in notes
    for phrase in ("Faster or truer", "Is it on?", "bypass", "compiles the kernels"):
        assert phrase in notes
    tile, overlap, frames, frame_overlap = widgets["VAEDecodeTiled"]
    assert tile >= 4 * overlap and frames >= 2 * frame_overlap
