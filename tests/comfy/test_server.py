# SPDX-License-Identifier: Apache-2.0
"""A real server on a machine without compilers and without Triton: import, run, report."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from safetensors.torch import load_file

from tests.comfy.conftest import PACK
from tests.comfy.graphs import ALL_WIDGETS, graph
from tools import locales


@pytest.fixture(scope="module")
def server(start_server, tiny_nodes: Path, no_toolchain: dict[str, str]) -> Any:
    return start_server(tiny_nodes, no_toolchain)


def test_the_pack_imports_without_a_toolchain(server, pack_folder):
    # ComfyUI exits 0 whatever fails, and names each pack with the seconds its import took.
    (line,) = (
        line for line in server.log().splitlines() if re.search("seconds.*" + pack_folder, line)
    )
    assert "IMPORT FAILED" not in line


def said_in_the_log(server, prompt: dict[str, Any], on_the_node: str = ".+\n.+") -> str:
    """The line of a run. Its verdict is the last text of the node; those before it tell how far the
    run is."""
    *before, text = (text for node, text in server.run_graph(prompt) if node == "2")
    assert all(re.fullmatch(r"Step \d of 4: .+ s a step, about .+ s left", each) for each in before)
    assert len(before) <= 3
    assert re.fullmatch(on_the_node, text) and max(map(len, text.split("\n"))) <= 48, text
    return re.findall(r"\[Sparge\] (.+ self-attention calls.*)", server.log())[-1]


@pytest.mark.parametrize("family", ["mochi", "wan", "cogvideox"])
def test_a_graph_runs_sparse_and_says_so_on_the_node(server, family):
    lines = r"[1-9]\d* of \d+ calls were sparse\.\n\d+ % of attention computed"
    assert "density" in said_in_the_log(server, graph(family, **ALL_WIDGETS), lines)


def test_flat_and_nested_names_give_the_same_run(server, base_directory):
    """The log has counts, density and error of the run, and the last file its latent. The browser
    sends what belongs to a mode under `mode.`."""
    lines, latents = [], []
    for topk in ("topk", "mode.topk"):
        widgets = {"mode": "auto budget", topk: 0.6, "min_tokens": 100, "start_percent": 0.3}
        line = said_in_the_log(server, graph("wan", **widgets))
        lines.append(re.sub(r"Speedup [\d.]+x[^;]*; ", "", line))
        file = max((base_directory / "output").glob("wan_*.latent"))
        latents.append(load_file(file)["latent_tensor"])
    assert lines[0] == lines[1] and "; error 0." in lines[0]
    assert torch.equal(*latents)


@pytest.mark.parametrize("topk", ["topk", "mode.topk"])
def test_short_and_long_names_are_refused_alike(server, topk):
    """Once, and before anything runs."""
    status, answer = server.post(
        "/prompt", {"prompt": graph("wan", mode="auto budget", **{topk: 7})}
    )
    (error,) = answer["node_errors"]["2"]["errors"]
    assert status == 400
    assert error["details"].startswith("topk is 7.0; it takes a number from 0.05 to 1.0."), error


def outputs_of(server, node: str) -> dict[str, Any]:
    """Outputs of the nodes of the run with that node; history comes a moment after the end."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for run in server.get("/history").values():
            if node in run["outputs"]:
                return run["outputs"]
        time.sleep(0.1)
    raise AssertionError(f"no run in the history has an output of node {node}")


def test_measured_and_reported(server):
    auto = ALL_WIDGETS | {"mode": "auto quality", "quality": "fast"}
    prompt = graph("wan", **auto)
    report = {"model": ["2", 0], "latent": ["6", 0]}
    prompt["8"] = {"class_type": "SpargeAttentionReport", "inputs": report}
    prompt["9"] = {"class_type": "PreviewAny", "inputs": {"source": ["8", 1]}}
    prompt["10"] = {"class_type": "PreviewImage", "inputs": {"images": ["8", 2]}}
    text = said_in_the_log(server, prompt)
    assert "; error 0." in text
    (under,) = [text.split("\n") for node, text in server.texts if node == "8"]
    assert len(under) == 2
    outputs = outputs_of(server, "9")
    (shown,) = outputs["9"]["text"]
    assert shown.splitlines()[0] == text
    assert outputs["8"]["text"] == [shown] and len(outputs["8"]["images"]) == 1, "on the node"
    assert len(outputs["10"]["images"]) == 1


def test_help_pages_and_translation_are_served(server, pack_folder):
    page = f"/extensions/{pack_folder}/docs/SpargeAttention"
    assert "# Sparge Attention" in server.get(f"{page}.md")
    assert "稀疏" in server.get(f"{page}/zh.md")
    assert "app.registerExtension" in server.get(f"/extensions/{pack_folder}/verdicts.js")
    assert "# Load CogVideoX" in server.get(
        f"/extensions/{pack_folder}/docs/SpargeCogVideoXLoad.md"
    )
    labels = {
        language: server.get("/i18n")[language]["nodeDefs"]["SpargeAttention"]["inputs"]
        for language in ("en", "zh")
    }
    assert server.get("/i18n").keys() >= set(locales.LANGUAGES)
    # ComfyUI looks an input `mode.topk` up as `mode_topk`.
    assert labels["en"]["mode_topk"]["name"] == "attention kept (topk)"
    assert "topk" in labels["zh"]["mode_topk"]["name"]


def test_the_templates_are_served(server: Any, pack_folder: str) -> None:
    workflows = [*(PACK / "workflows").glob("*.json")]
    templates = server.get("/workflow_templates")
    assert set(templates[pack_folder]) == {path.stem for path in workflows}
    for path in workflows:
        thumbnail = quote(f"/api/workflow_templates/{pack_folder}/{path.stem}.jpg")
        with urllib.request.urlopen(server.url + thumbnail, timeout=60) as answer:
            assert answer.read() == path.with_suffix(".jpg").read_bytes()


def test_the_blueprints_are_served(server: Any, pack_folder: str) -> None:
    subgraphs = [*(PACK / "subgraphs").glob("*.json")]
    offered = server.get("/global_subgraphs")
    ours = {
        entry["name"]: key
        for key, entry in offered.items()
        if entry["info"]["node_pack"] == f"custom_nodes.{pack_folder}"
    }
    assert ours.keys() == {path.stem for path in subgraphs}
    for path in subgraphs:
        entry = server.get(f"/global_subgraphs/{ours[path.stem]}")
        assert json.loads(entry["data"]) == json.loads(path.read_text(encoding="utf-8"))
