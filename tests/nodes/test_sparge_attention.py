# SPDX-License-Identifier: Apache-2.0
"""The node's face: what saved graphs rely on, and what every widget must explain."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from benchmarks.quality.rows import TARGETS

PACK = Path(__file__).resolve().parents[2]

#: For ever: append here when a widget is added, change nothing else.
WIDGETS = {
    "mode": "manual",
    "topk": 0.5,
    "pvthreshd": 15.0,
    "start_percent": 0.2,
    "end_percent": 1.0,
    "min_tokens": 4096,
    "dense_blocks": "",
    "select_by": "topk",
    "cdfthreshd": 0.98,
    "simthreshd1": -0.1,
    "quality": "balanced",
    "exact_dense": False,
}
COMBOS = {
    "mode": ["manual", "auto quality", "auto budget"],
    "select_by": ["topk", "cdf"],
    "quality": ["high", "balanced", "fast"],
}
#: What the frontend puts into a node that is added now, where that is not what execute() assumes.
NEW_NODES = {"mode": "auto quality", "start_percent": 0.1}
SOCKETS = ["profile"]


@pytest.fixture(scope="module")
def node(load_pack):
    return load_pack("nodes.sparge_attention").SpargeAttention


@pytest.fixture(scope="module")
def inputs(node):
    model, *inputs = node.define_schema().inputs
    assert model.id == "model"
    return inputs


@pytest.fixture(scope="module")
def widgets(inputs):
    assert [socket.id for socket in inputs[len(WIDGETS) :]] == SOCKETS
    return inputs[: len(WIDGETS)]


def test_the_extension_offers_the_node(load_pack, node):
    async def nodes():
        extension = await load_pack().comfy_entrypoint()
        return await extension.get_node_list()

    found = asyncio.run(nodes())
    assert found[0] is node
    schema = node.define_schema()
    assert (schema.display_name, schema.category) == ("Sparge Attention", "model/patch")
    assert [type(output).__name__ for output in schema.outputs] == ["ModelOutput"]
    names = [each.define_schema().node_id for each in found]
    assert names == ["SpargeAttention", "SpargeProfileLoad", "SpargeReport"]
    pages = PACK / load_pack().WEB_DIRECTORY / "docs"
    assert all((pages / f"{name}.md").is_file() for name in names)


def test_names_order_and_defaults(widgets):
    assert {widget.id: widget.default for widget in widgets} == WIDGETS | NEW_NODES
    assert [widget.id for widget in widgets] == list(WIDGETS)
    assert all(widget.optional for widget in widgets), "graphs from before a widget run"
    assert {w.id: w.options for w in widgets if hasattr(w, "options")} == COMBOS


def test_sliders_and_ranges(widgets):
    by_id = {widget.id: widget for widget in widgets}
    sliders = [w.id for w in widgets if getattr(w, "display_mode", None) == "slider"]
    assert sliders == ["topk", "pvthreshd"]
    assert (by_id["topk"].min, by_id["topk"].max) == (0.05, 1.0)
    assert (by_id["pvthreshd"].min, by_id["pvthreshd"].max) == (1.0, 50.0)
    basic = [w.id for w in widgets if not getattr(w, "advanced", False)]
    assert basic == ["mode", "topk", "pvthreshd", "quality"]


def test_every_widget_has_a_default_in_execute(load_pack, node):
    parameters = dict(inspect.signature(node.execute).parameters)
    parameters.pop("model")
    assert parameters.pop("profile").default is None
    assert {name: p.default for name, p in parameters.items()} == WIDGETS
    assert dataclasses.asdict(load_pack("nodes.settings").Settings()) == WIDGETS


def test_every_tooltip_says_which_way_is_faster_and_which_is_truer(inputs):
    for each in inputs:
        assert "faster" in each.tooltip.lower() and "truer" in each.tooltip, each.id


def test_the_qualities_are_told_with_their_targets(load_pack, widgets):
    qualities = load_pack("nodes.settings").QUALITIES
    assert qualities == TARGETS, "which the benchmark judges"
    assert list(qualities) == COMBOS["quality"]
    assert list(qualities.values()) == sorted(qualities.values())
    for name, target in qualities.items():
        assert f"{name} {100 * target:g} %" in widgets[-2].tooltip


@pytest.mark.parametrize(
    ("widgets", "aim"),
    [
        ({"quality": "high"}, None),
        ({"mode": "auto quality"}, ("quality", 0.05)),
        ({"mode": "auto quality", "quality": "high", "topk": 0.2}, ("quality", 0.03)),
        ({"mode": "auto budget", "quality": "high", "topk": 0.2}, ("budget", 0.2)),
    ],
)
def test_what_the_modes_ask_for(load_pack, widgets, aim):
    found = load_pack("nodes.settings").Settings(**widgets).aim
    assert aim == (found and (found.kind, found.value))


def test_measured_heads_keep_a_share_of_blocks(load_pack):
    """A head's density would mean a share of the mass with cdf."""
    settings = load_pack("nodes.settings").Settings
    assert settings(select_by="cdf").policy().select_by == "cdf"
    assert settings(select_by="cdf", mode="auto budget").policy().select_by == "topk"


def test_a_bad_block_list_is_refused_before_anything_runs(node):
    assert node.validate_inputs(dense_blocks="0-2, -1") is True
    assert "first" in node.validate_inputs(dense_blocks="first")
    assert node.validate_inputs(dense_blocks=None) is True  # a linked input is not known yet


@pytest.mark.parametrize(
    ("linked", "words"),
    [
        ({"topk": 2.0}, "topk is 2.0; it takes a number from 0 to 1"),
        ({"mode": "turbo"}, "mode is 'turbo'; it takes one of"),
        ({"mode": "auto quality", "quality": "best"}, "quality is 'best'"),
        ({"select_by": "topp"}, "select_by is 'topp'"),
        ({"end_percent": 80.0}, "end_percent is 80.0; it takes a number from 0 to 1"),
        ({"dense_blocks": "first"}, "dense_blocks contains 'first'"),
        ({"pvthreshd": -1.0}, "pvthreshd"),
    ],
)
def test_what_comes_through_a_link_is_refused_when_the_node_runs(node, patcher, linked, words):
    """The server checks widgets only."""
    with pytest.raises(ValueError, match=words):
        node.execute(patcher, **linked)


def test_the_chinese_translation_covers_the_node(widgets):
    text = (PACK / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8")
    translated = json.loads(text)["SpargeAttention"]
    assert list(translated["inputs"]) == ["model", *WIDGETS, *SOCKETS]
    assert all(entry["name"] and entry["tooltip"] for entry in translated["inputs"].values())


def test_the_chinese_page_explains_the_same_reasons():
    folder = PACK / "web" / "docs"
    english = (folder / "SpargeAttention.md").read_text(encoding="utf-8")
    chinese = (folder / "SpargeAttention" / "zh.md").read_text(encoding="utf-8")
    table = english.split("| reason | what to do |\n|---|---|\n")[1].split("\n\n")[0]
    reasons = [line.split("|")[1].strip() for line in table.splitlines()]
    assert len(reasons) > 5
    assert [reason for reason in reasons if f"| {reason}" not in chinese] == []


@pytest.mark.parametrize("page", ["SpargeAttention.md", "SpargeAttention/zh.md"])
def test_the_help_page_names_every_widget(page):
    text = (PACK / "web" / "docs" / page).read_text(encoding="utf-8")
    assert [name for name in [*WIDGETS, *SOCKETS] if f"| {name} |" not in text] == []
