# SPDX-License-Identifier: Apache-2.0
"""Other people's models and nodes in real ComfyUI: no graph breaks, and what is said is true."""

from __future__ import annotations

import pytest

EIGHT_BIT = 0.004  # half of the blocks dropped is 0.03
STEPS, SPARSE_STEPS = 4, 3

# name: (self-attentions a pass, their tokens, shown name, whether text is among the tokens)
MODELS = {
    "sd35_large": (3, {360 + 24}, "SD3", True),
    "sd35_medium": (5, {360 + 24, 360}, "SD3", True),
    "unet": (7, {24 * 28, 12 * 14}, "Stable Diffusion", False),
    "cosmos_predict2": (2, {4 * 8 * 10}, "Cosmos Predict2", False),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_without_a_row_are_sparse(comfyui, name):
    calls, tokens, shown, text = MODELS[name]
    got = comfyui.run("foreign", name=name, topk=1.0)
    assert got["sparse"] == SPARSE_STEPS * calls and got["dense"] == calls
    assert {call["tokens"] for call in got["calls"]} == tokens
    assert got["error"] < EIGHT_BIT
    assert got["text"].startswith(f"{shown}, {max(tokens)} tokens; ")
    assert ("text among its tokens is not kept exact" in got["text"]) == text
    assert "tokens stay in the order they come" in got["text"]
    assert ("text" in got["text"]) == text


@pytest.mark.parametrize("name", MODELS)
def test_one_dense_step_is_enough_to_measure_them(comfyui, name):
    """A new node is dropped into a distilled model's few steps."""
    calls, _, _, _ = MODELS[name]
    got = comfyui.run("foreign", name=name, mode="auto quality", quality="high")
    assert got["reasons"] == {"before start_percent 0.2": calls}
    assert got["sparse"] == SPARSE_STEPS * calls
    assert all(call["measured"] for call in got["calls"])
    assert got["error"] < 0.1


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("widgets", [{}, {"mode": "auto quality"}])
@pytest.mark.parametrize("name", ["wan", "ltxav"])
def test_a_node_that_replaces_the_clips_self_attention(comfyui, name, before, widgets):
    got = comfyui.run("replaced_self_attention", name=name, before=before, **widgets)
    said = "the clip's self-attention did not reach this node; another node replaces it"
    assert f", 320 tokens; NOTHING WAS SPARSE: {said}" in got["text"]
    assert "min_tokens" not in got["text"] and "dense because" not in got["text"]
    assert got["cross"] > 0 and got["sparse"] == 0


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("name", ["wan", "mochi"])
def test_fullgraph_stays_dense(comfyui, name, by_block, before):
    got = comfyui.run("whole_graph", name=name, by_block=by_block, before=before)
    for report in got["reports"]:
        assert report["sparse"] == 0 and report["forwards"] > 0
        assert "turn fullgraph off" in report["text"]
    assert max(got["errors"]) < 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_gives_nan(comfyui, value):
    """An infinite weight gives infinite values of either sign, whose mean is NaN."""
    got = comfyui.run("not_finite", value=value, mode="auto quality")
    why = "the model gave NaN here, without this node's doing"
    assert got["sparse"] == 0 and got["reasons"][why] == 2 * SPARSE_STEPS
    assert why in got["text"]


@pytest.mark.parametrize(
    ("by", "raised"), [("user", "InterruptProcessingException"), ("model", "RuntimeError")]
)
def test_a_run_that_ends_in_the_first_step(comfyui, by, raised):
    got = comfyui.run("stopped_in_the_first_step", by=by)
    assert got["raised"] == raised
    assert "NOTHING WAS SPARSE: stopped before the first sparse step" in got["text"]
    assert "reach" not in got["text"]


def test_an_empty_window(comfyui):
    got = comfyui.run("foreign", name="wan", start_percent=0.9, end_percent=0.1)
    assert got["reasons"] == {
        "start_percent 0.9 is above end_percent 0.1, so no step is between them": 2 * STEPS
    }


@pytest.mark.parametrize("mode", ["manual", "auto quality"])
def test_a_run_of_one_step(comfyui, mode):
    got = comfyui.run("foreign", name="wan", steps=1, mode=mode)
    assert got["sparse"] == 0
    assert ("is before start_percent: 0 can make it sparse" in got["text"]) == (mode == "manual")
    assert ("with start_percent 0 can make it sparse" in got["text"]) == (mode != "manual")


def test_null_names_no_block(comfyui):
    """ComfyUI hands on null of an API graph so."""
    got = comfyui.run("foreign", name="wan", dense_blocks="None", topk=1.0)
    assert got["sparse"] == 2 * SPARSE_STEPS
