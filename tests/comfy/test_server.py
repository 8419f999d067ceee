# SPDX-License-Identifier: Apache-2.0
"""A real server on a machine without compilers and without Triton: import, run, report."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.comfy.graphs import ALL_WIDGETS, graph


@pytest.fixture(scope="module")
def server(start_server, tiny_nodes: Path, no_toolchain: dict[str, str]) -> Any:
    return start_server(tiny_nodes, no_toolchain)


@pytest.fixture(scope="module")
def node_info(server) -> dict[str, Any]:
    return server.get("/object_info/SpargeAttention")["SpargeAttention"]


def test_the_pack_imports_without_a_toolchain(server, pack_folder):
    # ComfyUI exits 0 whatever fails, and names each pack with the seconds its import took.
    (line,) = (
        line for line in server.log().splitlines() if re.search("seconds.*" + pack_folder, line)
    )
    assert "IMPORT FAILED" not in line


def test_the_schema_reaches_the_browser(node_info):
    assert node_info["display_name"] == "Sparge Attention"
    assert node_info["category"] == "model/patch"
    # Optional: a graph that was saved before a widget existed still passes validation.
    assert node_info["input_order"]["required"] == ["model"]
    assert node_info["input_order"]["optional"] == [*ALL_WIDGETS, "profile"]
    inputs = node_info["input"]["optional"]
    assert inputs["profile"][0] == "SPARGE_PROFILE"
    assert {name: inputs[name][1]["default"] for name in ALL_WIDGETS} == ALL_WIDGETS | {
        "min_tokens": 4096,
        # For nodes that are added now; saved graphs name theirs.
        "mode": "auto quality",
        "start_percent": 0.1,
    }
    sliders = [name for name in ALL_WIDGETS if inputs[name][1].get("display") == "slider"]
    shown = [name for name in ALL_WIDGETS if not inputs[name][1].get("advanced")]
    assert sliders == ["topk", "pvthreshd"] and shown == ["mode", *sliders, "quality"]


def said_in_the_log(server, prompt: dict[str, Any], on_the_node: str = ".+\n.+") -> str:
    """The line of a run. Its verdict is the last text of the node; those before it tell how far the
    run is."""
    *before, text = (text for node, text in server.run_graph(prompt) if node == "2")
    assert all(re.fullmatch(r"Step \d of 4: .+ s a step, about .+ s left", each) for each in before)
    assert len(before) <= 3
    assert re.fullmatch(on_the_node, text) and max(map(len, text.split("\n"))) <= 40, text
    return re.findall(r"\[Sparge\] (.+ self-attention calls.*)", server.log())[-1]


@pytest.mark.parametrize("family", ["mochi", "wan", "cogvideox"])
def test_a_graph_runs_sparse_and_says_so_on_the_node(server, family):
    lines = r"\d+ of \d+ calls were sparse\n\d+ % of attention computed"
    text = said_in_the_log(server, graph(family, **ALL_WIDGETS), lines)
    sparse = re.search(r"(\d+) sparse and (\d+) dense self-attention calls", text)
    assert sparse, text
    assert int(sparse[1]) > 0


@pytest.mark.parametrize("left_out", ["quality", "mode"])
def test_a_graph_from_before_the_auto_modes_runs_manual(server, left_out):
    """Saved graphs name manual and have no quality; API graphs may name no mode at all."""
    settings = {name: value for name, value in ALL_WIDGETS.items() if name != left_out}
    text = said_in_the_log(server, graph("wan", **settings))
    assert "6 sparse and 2 dense self-attention calls" in text
    assert "predicted error" not in text


def outputs_of(server, node: str) -> dict[str, Any]:
    """Outputs of the nodes of the run with that node; history comes a moment after the end."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for run in server.get("/history").values():
            if node in run["outputs"]:
                return run["outputs"]
        time.sleep(0.1)
    raise AssertionError(f"no run in the history has an output of node {node}")


def test_measured_reported_saved_and_loaded(server, base_directory):
    auto = ALL_WIDGETS | {"mode": "auto quality", "quality": "fast"}
    prompt = graph("wan", **auto)
    report = {"model": ["2", 0], "latent": ["6", 0], "save_profile": "from a graph"}
    prompt["8"] = {"class_type": "SpargeReport", "inputs": report}
    prompt["9"] = {"class_type": "PreviewAny", "inputs": {"source": ["8", 1]}}
    prompt["10"] = {"class_type": "PreviewImage", "inputs": {"images": ["8", 2]}}
    text = said_in_the_log(server, prompt)
    assert "predicted error" in text
    remarks = [text.split("\n")[0] for node, text in server.texts if node == "8"]
    assert remarks == ["Saved the profile from a graph.safetensors."], "first, for room is short"
    assert server.previews and {node for node, _ in server.previews} == {"8"}, "while it sampled"
    assert all(picture.startswith(b"\x89PNG") for _, picture in server.previews)
    outputs = outputs_of(server, "9")
    (shown,) = outputs["9"]["text"]
    assert shown.splitlines()[0] == text
    assert shown.endswith("Saved the profile from a graph.safetensors.")
    assert outputs["8"]["text"] == [shown] and len(outputs["8"]["images"]) == 1, "on the node"
    assert len(outputs["10"]["images"]) == 1
    folder = base_directory / "models" / "sparge_profiles"
    assert (folder / "from a graph.safetensors").is_file()

    prompt = graph("wan", **auto | {"profile": ["11", 0], "start_percent": 0.0})
    prompt["11"] = {"class_type": "SpargeProfileLoad", "inputs": {"name": "from a graph"}}
    text = said_in_the_log(server, prompt)
    assert "8 sparse and 0 dense self-attention calls" in text
    assert ("11", "WanModel, for a mean error of 0.08") in server.texts, "what was loaded"


def test_defaults_on_a_tiny_clip_warn_that_nothing_was_sparse(server):
    lines = r"NOTHING WAS SPARSE\nfewer than min_tokens \(4096\) tokens"
    text = said_in_the_log(server, graph("wan", **ALL_WIDGETS | {"min_tokens": 4096}), lines)
    assert "NOTHING WAS SPARSE" in text
    assert "fewer than min_tokens (4096) tokens (8)" in text


def test_a_bad_block_list_is_refused_with_advice(server):
    prompt = graph("wan", **ALL_WIDGETS | {"dense_blocks": "first"})
    status, answer = server.post("/prompt", {"prompt": prompt})
    assert status == 400
    (error,) = answer["node_errors"]["2"]["errors"]
    assert "dense_blocks contains 'first'" in error["details"]


def test_help_pages_and_translation_are_served(server, pack_folder):
    page = f"/extensions/{pack_folder}/docs/SpargeAttention"
    assert "# Sparge Attention" in server.get(f"{page}.md")
    assert "稀疏" in server.get(f"{page}/zh.md")
    for node, title in (
        ("SpargeProfileLoad", "Load Sparge Profile"),
        ("SpargeReport", "Sparge Report"),
    ):
        assert f"# {title}" in server.get(f"/extensions/{pack_folder}/docs/{node}.md")
    assert server.get("/i18n")["zh"]["nodeDefs"]["SpargeAttention"]["inputs"]["topk"]["tooltip"]
