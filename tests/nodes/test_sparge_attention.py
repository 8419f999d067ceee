# SPDX-License-Identifier: Apache-2.0
"""The node's face: what saved graphs rely on, and what every widget must explain."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from benchmarks.quality.rows import TARGETS

PACK = Path(__file__).resolve().parents[2]

#: Defaults of Settings, which an API graph gets, in the order of the node.
WIDGETS = {
    "mode": "manual",
    "quality": "balanced",
    "topk": 0.5,
    "pvthreshd": 50.0,
    "select_by": "topk",
    "cdfthreshd": 0.98,
    "simthreshd1": -0.1,
    "start_percent": 0.2,
    "end_percent": 1.0,
    "min_tokens": 4096,
    "dense_blocks": "",
    "exact_dense": False,
}
#: For ever: append to a list here when a widget is added, change nothing else.
OF_MODES = {
    "auto quality": ["quality"],
    "auto budget": ["topk"],
    "manual": ["topk", "pvthreshd", "select_by", "cdfthreshd", "simthreshd1"],
}
OF_ALL_MODES = ["start_percent", "end_percent", "min_tokens", "dense_blocks", "exact_dense"]
COMBOS = {"select_by": ["topk", "cdf"], "quality": ["high", "balanced", "fast"]}
#: What the frontend puts into a node that is added now, where that is not what execute() assumes.
NEW_NODES = {"start_percent": 0.1}


@pytest.fixture(scope="module")
def node(load_pack):
    return load_pack("nodes.sparge_attention").SpargeAttention


@pytest.fixture(scope="module")
def inputs(node):
    model, *inputs = node.define_schema().inputs
    assert model.id == "model"
    return inputs


@pytest.fixture(scope="module")
def mode(inputs):
    return inputs[0]


@pytest.fixture(scope="module")
def widgets(inputs, mode):
    """All but `mode`, those of a mode first; topk is there twice."""
    of_modes = [widget for option in mode.options for widget in option.inputs]
    return of_modes + inputs[1:]


def test_the_extension_offers_the_node(load_pack, node):
    async def nodes():
        extension = await load_pack().comfy_entrypoint()
        return await extension.get_node_list()

    found = asyncio.run(nodes())
    assert found[0] is node
    schema = node.define_schema()
    assert schema.category == "model/patch"
    assert [type(output).__name__ for output in schema.outputs] == ["ModelOutput"]
    names = [each.define_schema().node_id for each in found]
    assert names == [
        "SpargeAttention",
        "SpargeAttentionReport",
        "SpargeAttentionCompare",
        "SpargeCogVideoXLoad",
        "SpargeAttentionWanVideoWrapper",
    ]
    pages = PACK / load_pack().WEB_DIRECTORY / "docs"
    assert all((pages / f"{name}.md").is_file() for name in names)


def test_names_order_and_defaults(inputs, mode, widgets):
    assert [each.id for each in inputs] == ["mode", *OF_ALL_MODES]
    found = {option.key: [each.id for each in option.inputs] for option in mode.options}
    assert found == OF_MODES and list(found) == list(OF_MODES), "a new node starts with the first"
    defaults = {"mode": WIDGETS["mode"]} | {each.id: each.default for each in widgets}
    assert defaults == WIDGETS | NEW_NODES
    assert all(each.optional for each in [*inputs, *widgets]), "graphs from before a widget run"
    assert {each.id: each.options for each in widgets if hasattr(each, "options")} == COMBOS


BUDGET = {"mode": "auto budget", "topk": 0.2}
#: What the server hands to execute(): as the browser names it, and as a graph by hand may.
GRAPHS = [
    ({}, {}),
    ({"topk": 0.3, "min_tokens": 512}, {"topk": 0.3, "min_tokens": 512}),
    (BUDGET, BUDGET),
    ({"mode": BUDGET}, BUDGET),
    ({"mode": {"mode": "auto budget", "topk": None}, "topk": 0.2}, BUDGET),
    ({"mode": BUDGET, "topk": 0.9}, BUDGET),
    ({"mode": {"mode": "auto budget", "topk": None}}, {"mode": "auto budget"}),
    ({"mode.topk": 0.3}, {"topk": 0.3}),
    ({"mode": "auto quality", "mode.quality": "fast"}, {"mode": "auto quality", "quality": "fast"}),
    ({"topk": 0.3, "end_percent": 1, "dense_blocks": None, "$$preview": "x"}, {"topk": 0.3}),
]
#: Values that are refused, by what the error says.
WRONG = [
    ({"topk": 0}, "topk is 0.0; it takes a number from 0.05 to 1.0."),
    ({"topk": 2.0}, "topk is 2.0; it takes a number from 0.05 to 1.0."),
    ({"topk": float("nan")}, "topk is nan; it takes a number from 0.05 to 1.0."),
    ({"topk": "half"}, "topk is 'half'; give a number"),
    ({"pvthreshd": 51}, "pvthreshd is 51.0; it takes a number from 1.0 to 50.0."),
    ({"quality": "best"}, "quality is 'best'; it takes one of"),
    (
        {"tokp": 0.3, "speed": 1},
        "Sparge Attention has no speed, tokp; it takes mode, quality, topk",
    ),
]


@pytest.mark.parametrize(("given", "meant"), GRAPHS)
def test_flat_and_nested_names_mean_the_same(load_pack, patch, given, meant):
    wanted = load_pack("sparge.session").Settings(**{"min_tokens": 4096} | meant)
    found = load_pack("nodes.hook").hook_of(patch(**{"min_tokens": 4096} | given)).settings
    assert found == wanted


def test_the_qualities_have_the_targets_that_the_benchmark_judges(load_pack):
    assert load_pack("sparge.session").QUALITIES == TARGETS


@pytest.mark.parametrize("given", ["0-2, -1", None, "None"])
def test_a_block_list_may_not_be_known_yet(node, given):
    """Through a link, and null in an API graph."""
    assert node.validate_inputs(model=None, dense_blocks=given)


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_short_and_long_names_are_refused_alike(node, patcher, given, said):
    """The server refuses it before anything runs, and the node refuses it when it runs."""
    long = {f"mode.{name}": value for name, value in given.items()}
    for inputs in (given, long, {"mode": {"mode": "manual", **given}}):
        for refuse in (node.validate_inputs, node.execute):
            with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
                refuse(model=patcher, **inputs)


@pytest.mark.parametrize(
    ("linked", "words"),
    [
        ({"mode": "turbo"}, "mode is 'turbo'; it takes one of"),
        ({"dense_blocks": "first"}, "dense_blocks contains 'first'"),
        ({"min_tokens": [4096]}, "min_tokens is a list; it takes a whole number"),
    ],
)
def test_what_comes_through_a_link_is_refused_when_the_node_runs(node, patcher, linked, words):
    """The server checks widgets only."""
    with pytest.raises(ValueError, match=words):
        node.execute(patcher, **linked)


@pytest.mark.parametrize("page", ["SpargeAttention.md", "SpargeAttention/zh.md"])
def test_the_help_page_names_every_widget(page):
    text = (PACK / "web" / "docs" / page).read_text(encoding="utf-8")
    assert [name for name in WIDGETS if f"**{name}**" not in text] == []
