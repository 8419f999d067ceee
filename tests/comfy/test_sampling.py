# SPDX-License-Identifier: Apache-2.0
"""Runs in real ComfyUI: samplers, schedules and windows; and beside other nodes, which
patch the model or override its attention."""

from __future__ import annotations

import pytest

from tests.comfy.expected import BLOCKS, EIGHT_BIT, FAST, SPARSE_STEPS, STEPS, WINDOW
from tests.comfy.overrides import BACKENDS, MEANINGS

OPEN = {"start_percent": 0.0}
ALL = {"topk": 1.0}
AUTO = {"mode": "auto quality"}
SPARSE = SPARSE_STEPS * BLOCKS
DIFFERENT = (
    "queries and keys differ in number (a node adds or merges tokens?), which only mode manual "
    "serves"
)


@pytest.mark.parametrize(
    ("widgets", "case", "sparse", "reasons"),
    [
        (ALL, {"steps": 1}, 0, {WINDOW: 1}),
        (ALL, {"steps": 20}, 16, {WINDOW: 4}),
        (ALL | {"end_percent": 0.6}, {"steps": 10}, 5, {WINDOW: 2, "after end_percent 0.6": 3}),
        (ALL, {"denoise": 0.5}, 4, {}),  # it starts inside the window
        # Without a dense window the first step measures.
        (AUTO, {"denoise": 0.5}, 3, {"measuring": 1}),
        (AUTO | OPEN, {"steps": 1}, 0, {"measuring": 1}),
        (AUTO | OPEN, {"cfg": 1.0}, 3, {"measuring": 1}),
        (AUTO | OPEN, {"name": "mochi"}, 2 * 3, {"measuring": 2}),  # it measures each prompt
    ],
)
def test_step_counts(comfyui, widgets, case, sparse, reasons):
    (got,) = comfyui.sampled(case.pop("name", "wan"), widgets, repeat=True, **case)
    assert got["sparse"] == sparse * BLOCKS
    assert got["reasons"] == {name: count * BLOCKS for name, count in reasons.items()}
    assert got["repeats"], "the same seed gives the same output and report"
    assert ("nothing was skipped" in got["text"]) == (sparse == 0)
    assert got["error"] < (EIGHT_BIT if "topk" in widgets else 0.1)
    if case.get("steps") == 1 and "start_percent" not in widgets:
        assert "nothing was skipped: all steps come before start_percent 0.2" in got["text"]


@pytest.mark.parametrize("sampler", ["heun", "dpm_2", "dpmpp_2s_ancestral", "seeds_3"])
def test_samplers_that_evaluate_between_steps(comfyui, sampler):
    for got in comfyui.sampled("wan", ALL, AUTO, steps=5, sampler=sampler):
        assert got["passes"] > 5
        assert got["sparse"] + got["dense"] == got["passes"] * BLOCKS
        assert got["sparse"] > got["dense"] > 0


@pytest.mark.parametrize("widgets", [ALL, AUTO, {"mode": "auto budget"}], ids=str)
def test_two_samplers_with_a_model_each(comfyui, widgets):
    """The second has no dense window."""
    got = comfyui.run("two_samplers", **widgets)
    high, low = got["reports"]
    assert high["reasons"] == {WINDOW: BLOCKS} and high["sparse"] == BLOCKS
    measured = "mode" in widgets
    assert low["reasons"] == ({"measuring": BLOCKS} if measured else {})
    assert low["sparse"] == (1 if measured else 2) * BLOCKS
    assert measured or got["error"] < EIGHT_BIT


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


@pytest.mark.parametrize(
    ("before", "name", "sparse"),
    [
        ("skipped layer", "ltxv", 1),
        ("skipped layer", "ltxav", 1),
        ("skipped layer", "mochi", 1),
        ("spatio-temporal", "ltxv", 2),
        ("spatio-temporal", "ltxav", 1),
        ("perturbed", "square unet", 7 + 5),
    ],
)
def test_guidance_that_leaves_layers_out_shifts_no_other(comfyui, before, name, sparse):
    """In one of two passes, and not the last layer, which dense_blocks names. Of the nodes for
    LTXV, the second does nothing without sound. sparse: calls of the other layers in a step."""
    (got,) = comfyui.sampled(name, ALL | {"dense_blocks": "-1"}, before=before)
    assert got["reasons"]["listed in dense_blocks"] == SPARSE_STEPS * 2
    assert got["sparse"] == SPARSE_STEPS * sparse


#: Families and their layers, for overrides of runs of six steps, of which two are dense.
LAYERS = {
    "wan": 2, "flux": 3, "mochi": 2, "cogvideox": 2, "hunyuan": 3, "ltxv": 2, "kandinsky": 2,
    "unet": 7,
}  # fmt: skip
CHANGES = "another node changes this attention"
CHECKING = "checking another node's attention"


@pytest.mark.parametrize(
    ("name", "meaning"),
    [*((name, "temperature") for name in LAYERS), *(("flux", meaning) for meaning in MEANINGS)],
)
def test_an_override_with_a_meaning_of_its_own_keeps_it(comfyui, name, meaning):
    """Mochi's prompts differ in length, LTXV has a mask and text of its own."""
    for got in comfyui.sampled(name, ALL, ALL | {"mode": "auto budget"}, before=meaning, steps=6):
        assert got["error"] == got["sparse"] == 0
        assert got["reasons"][CHANGES] >= 4 * LAYERS[name]
        assert got["verdict"].startswith("Nothing skipped: another node") and CHANGES in got["text"]


@pytest.mark.parametrize(
    ("name", "meaning"),
    [*((name, "eight bit") for name in LAYERS), *(("flux", backend) for backend in BACKENDS)],
)
def test_an_override_that_is_a_backend_stays_one(comfyui, name, meaning):
    """All layers say so in the first step, and one in the sixth whether it is one still."""
    (got,) = comfyui.sampled(name, ALL | OPEN, before=meaning, steps=7)
    assert got["sparse"] >= 6 * LAYERS[name] - 1 and got["reasons"][CHECKING] > LAYERS[name]
    assert CHANGES not in got["reasons"]
    assert got["error"] < 2 * EIGHT_BIT, "its own 8 bits against ours"


@pytest.mark.parametrize(
    ("patch", "checked"),
    [
        ({"before": "chosen backend"}, 0),
        ({"after": "chosen backend"}, 0),
        ({"before": "function of a pack"}, BLOCKS),
    ],
    ids=str,
)
def test_what_comfyuis_node_chooses_is_known_without_a_comparison(comfyui, patch, checked):
    (got,) = comfyui.sampled("wan", ALL | OPEN, **patch)
    assert got["reasons"].get(CHECKING, 0) == checked
    assert got["sparse"] == SPARSE + BLOCKS - checked
    assert got["error"] < EIGHT_BIT


def test_what_a_model_prefers_by_its_file(comfyui):
    got = comfyui.run("preferred")
    if got is None:
        pytest.skip("this ComfyUI has no models that prefer a function")
    assert got["without"] == [0] * STEPS and got["with"] == [0], "the dense step has it"
    assert got["sparse"] == SPARSE and got["error"] < EIGHT_BIT
