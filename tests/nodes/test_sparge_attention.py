# SPDX-License-Identifier: Apache-2.0
"""The node's face: what saved graphs rely on, and what every widget must explain."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from pathlib import Path

import pytest

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
}
COMBOS = {"mode": ["manual"], "select_by": ["topk", "cdf"]}


@pytest.fixture(scope="module")
def node(load_pack):
    return load_pack("nodes.sparge_attention").SpargeAttention


@pytest.fixture(scope="module")
def widgets(node):
    model, *widgets = node.define_schema().inputs
    assert model.id == "model"
    return widgets


def test_the_extension_offers_the_node(load_pack, node):
    async def nodes():
        extension = await load_pack().comfy_entrypoint()
        return await extension.get_node_list()

    assert asyncio.run(nodes()) == [node]
    assert (PACK / load_pack().WEB_DIRECTORY / "docs" / "SpargeAttention.md").is_file()


def test_identity(node):
    schema = node.define_schema()
    assert schema.node_id == "SpargeAttention"
    assert schema.display_name == "Sparge Attention"
    assert schema.category == "model/patch"
    assert [type(output).__name__ for output in schema.outputs] == ["ModelOutput"]


def test_names_order_and_defaults(widgets):
    assert {widget.id: widget.default for widget in widgets} == WIDGETS
    assert [widget.id for widget in widgets] == list(WIDGETS)
    assert {w.id: w.options for w in widgets if hasattr(w, "options")} == COMBOS


def test_sliders_and_ranges(widgets):
    by_id = {widget.id: widget for widget in widgets}
    sliders = [w.id for w in widgets if getattr(w, "display_mode", None) == "slider"]
    assert sliders == ["topk", "pvthreshd"]
    assert (by_id["topk"].min, by_id["topk"].max) == (0.05, 1.0)
    assert (by_id["pvthreshd"].min, by_id["pvthreshd"].max) == (1.0, 50.0)
    basic = [w.id for w in widgets if not getattr(w, "advanced", False)]
    assert basic == ["mode", "topk", "pvthreshd"]


def test_every_widget_has_a_default_in_execute(node):
    parameters = dict(inspect.signature(node.execute).parameters)
    parameters.pop("model")
    assert {name: p.default for name, p in parameters.items()} == WIDGETS


def test_settings_are_the_widgets(load_pack):
    settings = load_pack("nodes.settings").Settings()
    assert dataclasses.asdict(settings) == WIDGETS


def test_every_tooltip_says_which_way_is_faster_and_which_is_truer(widgets):
    for widget in widgets:
        if widget.id != "mode":  # one option so far: no way to go
            assert "faster" in widget.tooltip and "truer" in widget.tooltip, widget.id


def test_a_bad_block_list_is_refused_before_anything_runs(node):
    assert node.validate_inputs(dense_blocks="0-2, -1") is True
    assert "first" in node.validate_inputs(dense_blocks="first")
    assert node.validate_inputs(dense_blocks=None) is True  # a linked input is not known yet


def test_the_chinese_translation_covers_the_node(widgets):
    text = (PACK / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8")
    translated = json.loads(text)["SpargeAttention"]
    assert list(translated["inputs"]) == ["model", *WIDGETS]
    assert all(entry["name"] and entry["tooltip"] for entry in translated["inputs"].values())


@pytest.mark.parametrize("page", ["SpargeAttention.md", "SpargeAttention/zh.md"])
def test_the_help_page_names_every_widget(page):
    text = (PACK / "web" / "docs" / page).read_text(encoding="utf-8")
    assert [name for name in WIDGETS if f"| {name} |" not in text] == ["mode"]
