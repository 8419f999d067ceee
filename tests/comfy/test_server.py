# SPDX-License-Identifier: Apache-2.0
"""A real server on a machine without compilers and without Triton: import, run, report."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

COMPILERS = ("nvcc", "gcc", "g++", "cc", "clang", "cl", "ninja")


@pytest.fixture(scope="module")
def no_toolchain(comfyui_env: dict[str, str], tmp_path_factory) -> dict[str, str]:
    """An environment in which no compiler is found and importing triton fails."""
    empty = tmp_path_factory.mktemp("empty_path")
    broken = tmp_path_factory.mktemp("no_triton")
    (broken / "triton").mkdir()
    (broken / "triton" / "__init__.py").write_text("raise ImportError('hidden by the test')\n")
    assert not any(shutil.which(name, path=str(empty)) for name in COMPILERS)
    python_path = os.pathsep.join([str(broken), comfyui_env["PYTHONPATH"]])
    return comfyui_env | {"PATH": str(empty), "PYTHONPATH": python_path, "CUDA_HOME": str(empty)}


@pytest.fixture(scope="module")
def server(start_server, base_directory: Path, no_toolchain: dict[str, str]) -> Any:
    helper = base_directory / "custom_nodes" / "tiny_nodes"
    shutil.copytree(HERE / "tiny_nodes", helper)
    shutil.copy(HERE / "models.py", helper)
    return start_server(base_directory, no_toolchain)


@pytest.fixture(scope="module")
def node_info(server) -> dict[str, Any]:
    return server.get("/object_info/SpargeAttention")["SpargeAttention"]


def graph(family: str, **widgets: Any) -> dict[str, Any]:
    """Model -> SpargeAttention (node 2) -> KSampler -> SaveLatent, with every default but these."""
    cond = [
        {"class_type": "TinyConditioning", "inputs": {"family": family, "negative": negative}}
        for negative in (False, True)
    ]
    settings = {
        "seed": 7, "steps": 4, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple",
        "denoise": 1.0,
    }  # fmt: skip
    wires = {
        "model": ["2", 0],
        "positive": ["3", 0],
        "negative": ["4", 0],
        "latent_image": ["5", 0],
    }
    return {
        "1": {"class_type": "TinyModel", "inputs": {"family": family}},
        "2": {"class_type": "SpargeAttention", "inputs": {"model": ["1", 0]} | widgets},
        "3": cond[0],
        "4": cond[1],
        "5": {"class_type": "TinyLatent", "inputs": {"family": family}},
        "6": {"class_type": "KSampler", "inputs": settings | wires},
        "7": {
            "class_type": "SaveLatent",
            "inputs": {"samples": ["6", 0], "filename_prefix": family},
        },
    }


ALL_WIDGETS = {
    "mode": "manual", "topk": 0.5, "pvthreshd": 15.0, "start_percent": 0.2, "end_percent": 1.0,
    "min_tokens": 100, "dense_blocks": "", "select_by": "topk", "cdfthreshd": 0.98,
    "simthreshd1": -0.1, "quality": "balanced",
}  # fmt: skip


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
        "mode": "auto quality",  # for nodes that are added now; saved graphs name theirs
    }
    assert [name for name in ALL_WIDGETS if inputs[name][1].get("display") == "slider"] == [
        "topk",
        "pvthreshd",
    ]
    assert [name for name in ALL_WIDGETS if not inputs[name][1].get("advanced")] == [
        "mode",
        "topk",
        "pvthreshd",
        "quality",
    ]


@pytest.mark.parametrize("family", ["mochi", "wan", "cogvideox"])
def test_a_graph_runs_sparse_and_says_so_on_the_node(server, family):
    texts = server.run_graph(graph(family, **ALL_WIDGETS))
    (text,) = (text for node, text in texts if node == "2")
    sparse = re.search(r"(\d+) sparse and (\d+) dense self-attention calls", text)
    assert sparse, text
    assert int(sparse[1]) > 0
    assert f"[Sparge] {text}" in server.log()


@pytest.mark.parametrize("left_out", ["quality", "mode"])
def test_a_graph_from_before_the_auto_modes_runs_manual(server, left_out):
    """Saved graphs name manual and have no quality; API graphs may name no mode at all."""
    settings = {name: value for name, value in ALL_WIDGETS.items() if name != left_out}
    texts = server.run_graph(graph("wan", **settings))
    (text,) = (text for node, text in texts if node == "2")
    assert "6 sparse and 2 dense self-attention calls" in text
    assert "predicted error" not in text


def outputs_of(server, node: str) -> dict[str, Any]:
    """What the nodes of the run with that node gave out; history comes a moment after the end."""
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
    texts = server.run_graph(prompt)
    (text,) = (text for node, text in texts if node == "2")
    assert "predicted error" in text
    outputs = outputs_of(server, "9")
    (shown,) = outputs["9"]["text"]
    assert shown.splitlines()[0] == text
    assert shown.endswith("Saved the profile from a graph.safetensors.")
    assert len(outputs["10"]["images"]) == 1
    folder = base_directory / "models" / "sparge_profiles"
    assert (folder / "from a graph.safetensors").is_file()

    prompt = graph("wan", **auto | {"profile": ["11", 0], "start_percent": 0.0})
    prompt["11"] = {"class_type": "SpargeProfileLoad", "inputs": {"name": "from a graph"}}
    texts = server.run_graph(prompt)
    (text,) = (text for node, text in texts if node == "2")
    assert "8 sparse and 0 dense self-attention calls" in text


def test_defaults_on_a_tiny_clip_warn_that_nothing_was_sparse(server):
    texts = server.run_graph(graph("wan", **ALL_WIDGETS | {"min_tokens": 4096}))
    (text,) = (text for node, text in texts if node == "2")
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
