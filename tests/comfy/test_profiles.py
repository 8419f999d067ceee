# SPDX-License-Identifier: Apache-2.0
"""Profiles of measured heads and reports, in real ComfyUI."""

from __future__ import annotations

import pytest

from tests.comfy.expected import BLOCKS, SPARSE_STEPS, WINDOW


@pytest.fixture(scope="module")
def profiles(comfyui):
    return comfyui.run("profile_saved_and_loaded")


def test_a_profile_is_saved_and_spares_the_measuring(profiles):
    assert profiles["saved"] == "Saved the profile tiny wan.safetensors."
    assert profiles["again"] == "Saved the profile tiny wan.safetensors over the one of that name."
    assert "No profile was saved" in profiles["unsafe"], "it never leaves its folder"
    assert profiles["changed"]
    measured, loaded = profiles["measured"], profiles["loaded"]
    assert measured["reasons"] == {WINDOW: BLOCKS} and loaded["reasons"] == {}
    assert loaded["sparse"] == 4 * BLOCKS  # denoise 0.5: it would have measured
    for report in (measured, loaded):
        assert report["predicted"] == pytest.approx(profiles["errors"], rel=1e-5)


def test_a_profile_of_another_model_is_not_used(profiles):
    report = profiles["other model"]
    reason = "measured on WanModel and this model is LTXVModel"
    assert reason in report["text"] and "this run measures" in report["text"].lower()
    assert report["reasons"] == {WINDOW: BLOCKS}
    assert report["sparse"] == SPARSE_STEPS * BLOCKS


def test_the_loader_offers_what_was_saved_and_what_other_folders_hold(profiles):
    before, after = profiles["listed"]
    assert "tiny wan.safetensors" not in before
    assert {"tiny wan.safetensors", "more/of wan.safetensors"} <= set(after)
    assert profiles["more"] == ["WanModel, for a mean error of 0.08"] * 2


def test_a_profile_of_other_weights_warns(profiles):
    for case in ("other weights", "lora"):
        assert "a finetune or a LoRA" in profiles[case]["text"]
        assert profiles[case]["predicted"] == profiles["measured"]["predicted"]


def test_a_profile_fits_prompts_of_other_lengths(comfyui):
    got = comfyui.run("profile_of_another_prompt")
    measured, loaded = got["reports"]
    assert sorted(measured["shapes"]) == [327, 340]
    assert sorted(loaded["shapes"]) == [329, 341]
    assert loaded["reasons"] == {} and loaded["sparse"] == 4 * 2 * 2
    for report in got["reports"]:
        assert report["predicted"] == pytest.approx(got["errors"], rel=1e-5)
    for text, given in ((20, 21), (7, 9)):
        said = f"The profile was measured with {text} tokens of text and is used for {given}"
        assert said in loaded["text"] and said not in measured["text"]
