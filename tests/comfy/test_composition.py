# SPDX-License-Identifier: Apache-2.0
"""The node beside other nodes that patch a model, in real ComfyUI."""

from __future__ import annotations

import pytest

from tests.comfy.expected import BLOCKS, EIGHT_BIT, FAST, SPARSE_STEPS, STEPS, WINDOW

ALL = {"topk": 1.0}
SPARSE = SPARSE_STEPS * BLOCKS
DIFFERENT = (
    "queries and keys differ in number (a node adds or merges tokens?), which only mode manual "
    "serves"
)
LISTED = "listed in dense_blocks"


def test_core_sparse_node_on_the_same_model_is_named(comfyui):
    got = comfyui.run("rewraps_each_step")
    assert "Model Sparse Attention" in got["text"]
    assert got["wraps"] == got["depths"] == 1, "nothing piles up"


@pytest.mark.parametrize("name", ["wan", "ltxav, no sound"])
def test_context_windows(comfyui, name):
    """Clips have 4 and 5 frames, as the second gets one of context: two shapes are measured."""
    everything, auto = comfyui.sampled(name, ALL, FAST, before="windows", frames=7)
    for got in (everything, auto):
        assert got["sparse"] == 2 * SPARSE
        assert all(call["segments"] for call in got["calls"]), "the grid is that of the window"
        assert {call["tokens"] for call in got["calls"]} == {4 * 8 * 10, 5 * 8 * 10}
    assert everything["error"] < EIGHT_BIT


def test_a_node_that_skips_whole_steps(comfyui):
    (got,) = comfyui.sampled("wan", FAST, before="easy cache", steps=10)
    assert 0 < got["sparse"] < 8 * BLOCKS


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_window_is_resolved_when_sampling_starts(comfyui, order):
    (got,) = comfyui.sampled("wan", {}, steps=10, **{order: "shift"})
    assert got["sparse"] == 8 * BLOCKS


@pytest.mark.parametrize(
    ("name", "order", "widgets"),
    [("wan", "before", ALL), ("wan", "after", FAST), ("flux", "after", ALL)],
)
def test_torch_compile(comfyui, name, order, widgets):
    (got,) = comfyui.sampled(name, widgets, repeat=True, **{order: "compiled"})
    assert got["sparse"] == SPARSE_STEPS * (3 if name == "flux" else BLOCKS) and got["repeats"]
    assert got["error"] < (EIGHT_BIT if widgets is ALL else 0.1)


@pytest.mark.parametrize(
    ("name", "by_block", "before"),
    [("wan", False, True), ("wan", True, False), ("mochi", False, False)],
)
def test_fullgraph_stays_dense(comfyui, name, by_block, before):
    got = comfyui.run("whole_graph", name=name, by_block=by_block, before=before)
    assert got["sparse"] == 0 and got["passes"] > 0 and got["repeats"]
    assert "turn fullgraph off" in got["text"] and got["error"] < 1e-5


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["wan", "ltxav"])
def test_a_node_that_replaces_the_clips_self_attention(comfyui, name, order):
    widgets = {}, {"mode": "auto quality"}
    for got in comfyui.sampled(name, *widgets, **{order: "replaced attention"}):
        said = "the clip's self-attention did not reach this node; another node replaces it"
        assert f", 320 tokens; NOTHING WAS SPARSE: {said}" in got["text"]
        assert "min_tokens" not in got["text"] and "dense because" not in got["text"]
        assert got["cross"] > 0 and got["sparse"] == 0


@pytest.mark.parametrize("before", ["merged tokens", "tiles", "perturbed"])
def test_nodes_that_change_the_tokens_of_a_unet(comfyui, before):
    """The U-Net has 8 self-attentions, of which 3 are as large as the latent. Merged tokens are no
    text; tiles are self-attention, four of 256 tokens; guidance leaves the middle's two out."""
    everything, auto = comfyui.sampled("square unet", ALL, FAST, before=before)
    calls = 8 + 6 if before == "perturbed" else 8
    assert everything["sparse"] == SPARSE_STEPS * calls
    assert everything["reasons"] == {WINDOW: calls} and everything["error"] < 0.02
    assert auto["sparse"] > 0
    if before == "tiles":
        assert {call["tokens"] for call in everything["calls"]} == {256}
    if before != "perturbed":
        assert everything["cross"] == auto["cross"] == STEPS * 8
    assert auto["reasons"].get(DIFFERENT, 0) == (STEPS * 3 if before == "merged tokens" else 0)


@pytest.mark.parametrize("name", ["square unet", "flux"])
def test_guidance_in_the_results_of_attention_leaves_every_call_sparse(comfyui, name):
    plain, nag = (comfyui.sampled(name, ALL, before=before)[0] for before in ("", "normalized"))
    assert nag["sparse"] == plain["sparse"] > 0 and nag["error"] < 0.02


#: Calls of the 8 self-attentions of the U-Net, and those of them with fewer keys than min_tokens.
OTHER_NUMBERS = {
    "keys of a reference": (8, 0),
    "merged keys": (8, 5),
    "queries in halves": (16, 0),
}


@pytest.mark.parametrize("before", OTHER_NUMBERS)
def test_self_attention_of_other_numbers_of_queries_and_keys(comfyui, before):
    """It is no cross-attention, which the U-Net has in each block as well."""
    calls, short = OTHER_NUMBERS[before]
    everything, auto = comfyui.sampled("square unet", ALL, FAST, before=before)
    fewer = {"fewer than min_tokens (100) tokens": STEPS * short} if short else {}
    assert everything["sparse"] == SPARSE_STEPS * (calls - short)
    assert everything["reasons"] == {WINDOW: calls - short} | fewer
    assert everything["error"] < 0.02
    assert auto["reasons"] == {DIFFERENT: STEPS * (calls - short)} | fewer
    assert "cross-attention" not in auto["verdict"] and "NOTHING WAS SPARSE" in auto["verdict"]
    for got in (everything, auto):
        assert got["cross"] == STEPS * 8


def test_calls_for_some_heads_at_a_time(comfyui):
    """Four calls a layer in a model that publishes no block, of two prompts one by one."""
    layers, calls = 2, 4
    a_step = 2 * layers * calls
    widgets = ALL, ALL | {"dense_blocks": "0"}, FAST, FAST | {"start_percent": 0.0}
    runs = comfyui.sampled("minimax h3, eight heads", *widgets, before="heads apart")
    everything, listed, auto, first = runs
    assert everything["sparse"] == auto["sparse"] == SPARSE_STEPS * a_step
    assert auto["reasons"] == {WINDOW: a_step}
    assert listed["reasons"] == {WINDOW: a_step, LISTED: SPARSE_STEPS * a_step // layers}
    assert first["reasons"] == {"measuring": a_step}
    assert everything["error"] < EIGHT_BIT and auto["error"] < 0.1
    assert len(auto["by_step"]) == layers * calls


COND, UNCOND = [0], [1]


@pytest.mark.parametrize("family", ["ltxv", "ltxav", "mochi"])
def test_skip_layer_guidance_shifts_no_block(comfyui, family):
    found = comfyui.run("guided", kind="skipped layer", family=family)
    assert found["seen"] == [[COND, 0, 0], [COND, 1, 1], [UNCOND, 1, 1]]
    assert found["report"]["sparse"] > 0


@pytest.mark.parametrize(
    ("kind", "family"),
    [("spatio-temporal", "ltxv"), ("spatio-temporal", "ltxav"), ("half the size", "ltxv")],
)
def test_guides_shift_no_block(comfyui, kind, family):
    found = comfyui.run("guided", kind=kind, family=family)
    assert {(running, row) for _, running, row in found["seen"]} == {(0, 0), (1, 1)}
    assert len(found["report"]["by_step"]) == BLOCKS, "and sound is none"
    assert found["report"]["sparse"] > 0


def test_perturbed_attention_guidance_shifts_no_layer(comfyui):
    """It runs a U-Net's middle without self-attention; its blocks keep their rows."""
    got = comfyui.run("perturbed_attention")
    plain, perturbed = (
        {tuple(place): row for which, *place, row in got["seen"] if which == guided}
        for guided in (False, True)
    )
    assert len(plain) == len(set(plain.values())) == 8
    assert perturbed == {place: row for place, row in plain.items() if place[0] != "middle"}
    assert len(got["seen"]) == len(plain) + len(perturbed), "each has one row"
    assert got["report"]["reasons"].keys() <= {WINDOW, "measuring"}


def test_two_models_of_a_guider_share_no_measured_heads(comfyui):
    found = comfyui.run("two_models_of_a_guider")
    assert found["heads"] == {"first": 1, "second": 1} and found["shared"] == 0
    assert "a second model" in found["report"]["text"]
