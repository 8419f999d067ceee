# SPDX-License-Identifier: Apache-2.0
"""Attention overrides of other nodes beside ours, in real ComfyUI: backends, which sparse calls
pass by, and such as change what attention means, which keep that. Runs have six steps, of which the
first two are dense."""

from __future__ import annotations

import pytest

from tests.comfy.expected import EIGHT_BIT
from tests.comfy.overrides import BACKENDS, MEANINGS

CHANGES = "another node changes this attention"
CHECKING = "checking another node's attention"
ALL = {"topk": 1.0}
BUDGET = {"mode": "auto budget", "topk": 1.0}
#: Families and their layers.
LAYERS = {"wan": 2, "flux": 3}


@pytest.mark.parametrize(
    ("name", "widgets"), [("wan", ALL), ("wan", BUDGET), ("flux", ALL)], ids=str
)
@pytest.mark.parametrize("meaning", MEANINGS)
def test_a_meaning_is_kept(comfyui, meaning, name, widgets):
    got = comfyui.run("overridden", name=name, meaning=meaning, **widgets)
    assert got["changes"] > EIGHT_BIT and got["error"] == 0 and got["sparse"] == 0
    assert got["reasons"][CHANGES] >= 4 * LAYERS[name]
    assert got["verdict"] == f"NOTHING WAS SPARSE\n{CHANGES}"


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("meaning", BACKENDS)
def test_a_backend_stays_one(comfyui, meaning, name):
    """In one of four sparse steps one layer says whether it is one still."""
    got = comfyui.run("overridden", name=name, meaning=meaning, **ALL)
    assert got["sparse"] == 4 * LAYERS[name] - 1 and got["reasons"][CHECKING] == 1
    assert CHANGES not in got["reasons"] and got["error"] < EIGHT_BIT


@pytest.mark.parametrize("name", ["mochi", "cogvideox", "hunyuan", "ltxv", "kandinsky", "unet"])
def test_other_families(comfyui, name):
    """Mochi's prompts differ in length, LTXV has a mask and text of its own."""
    changed = comfyui.run("overridden", name=name, meaning="temperature", **ALL)
    assert changed["changes"] > EIGHT_BIT and changed["error"] == changed["sparse"] == 0
    plain = comfyui.run("overridden", name=name, meaning="eight bit", **ALL)
    assert plain["sparse"] > 0 and CHANGES not in plain["reasons"]
    assert plain["error"] < 2 * EIGHT_BIT, "its own 8 bits against ours"


@pytest.mark.parametrize(
    ("place", "sparse"),
    [("overwriting", 0), ("in each pass", 0), ("chained", 8)],
)
def test_wherever_it_is_set(comfyui, place, sparse):
    """One that calls ours stays outside, with a meaning too."""
    got = comfyui.run("overridden", name="wan", meaning="temperature", place=place, **ALL)
    assert got["sparse"] == sparse and got["changes"] > EIGHT_BIT > got["error"]


@pytest.mark.parametrize("split", [False, True], ids=["one pass", "a pass a prompt"])
def test_layers_in_which_it_does_not_act_are_sparse(comfyui, split):
    given = {"meaning": "gain", "where": "the second block", "split": split}
    got = comfyui.run("overridden", name="wan", **given, **ALL)
    passes = 1 + split
    assert got["reasons"][CHANGES] == 4 * passes and got["sparse"] == (4 - 1) * passes
    assert got["changes"] > EIGHT_BIT > got["error"]


@pytest.mark.parametrize("split", [False, True], ids=["one pass", "a pass a prompt"])
def test_one_that_acts_on_the_negative_prompt_alone(comfyui, split):
    got = comfyui.run("overridden", name="wan", meaning="gain of one prompt", split=split, **ALL)
    assert got["sparse"] == got["error"] == 0 and got["changes"] > EIGHT_BIT


@pytest.mark.parametrize("widgets", [ALL, BUDGET], ids=str)
def test_one_that_begins_to_act_later_is_noticed(comfyui, widgets):
    given = {"meaning": "temperature", "where": "later steps", "steps": 16}
    got = comfyui.run("overridden", name="wan", **given, **widgets)
    assert got["sparse"] > 0 and got["reasons"][CHANGES] > 4
    assert got["error"] < 0.1 * got["changes"]


@pytest.mark.parametrize("order", ["before", "after"])
def test_comfyuis_node_for_a_backend_is_known(comfyui, order):
    """It is known without a comparison; a function that is none of ComfyUI's is not."""
    got = comfyui.run("with_backends", order=order)
    assert got["sparse"] == 6 and CHECKING not in got["reasons"] and got["error"] < EIGHT_BIT
    assert got["own"] == [True, True, True, False]
