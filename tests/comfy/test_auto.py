# SPDX-License-Identifier: Apache-2.0
"""Auto modes in real ComfyUI: every family, step counts, samplers, profiles, reports."""

from __future__ import annotations

import pytest

#: family: (blocks, forward passes a step, self-attention shapes)
FAMILIES = {
    "mochi": (2, 2, [327, 340]),  # prompts differ in length, so each has choices of its own
    "cogvideox": (2, 1, [344]),
    "cogvideox15": (2, 1, [264]),
    "wan": (2, 1, [320]),
    "hunyuan": (3, 1, [344]),
    "ltxv": (2, 1, [320]),
    "kandinsky": (2, 1, [320]),
    "flux": (3, 1, [384]),
}
MODES = [{"mode": "auto quality", "quality": "fast"}, {"mode": "auto budget", "topk": 0.6}]
BLOCKS = 2  # of the tiny Wan


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("widgets", MODES, ids=lambda widgets: widgets["mode"])
def test_families(comfyui, name, widgets):
    """Random weights: what counts is that each is measured and sparse, not how sparse."""
    blocks, passes, shapes = FAMILIES[name]
    got = comfyui.run("auto", name=name, widgets=widgets)
    assert got["sparse"] == 3 * passes * blocks
    assert got["reasons"]["before start_percent 0.2"] == passes * blocks
    assert got["all_measured"]
    assert sorted(got["shapes"]) == shapes
    assert got["repeatable"]
    if "quality" in widgets:
        assert 0 < got["predicted_error"] <= 0.1
        assert f"predicted error {got['predicted_error']:.3f}" in got["text"]
        assert got["error"] < 0.1
    else:
        # One block for all to share is the least; text and the first query block come on top.
        assert got["density"] < 0.85
        assert got["error"] < 0.3
    assert got["kept"] and f"(heads {100 * min(got['kept']):.1f} %" in got["text"]


OPEN = {"start_percent": 0.0}


@pytest.mark.parametrize(
    ("case", "sparse_steps", "window"),
    [
        ({"steps": 1}, 0, 1),
        ({"steps": 4}, 3, 1),
        ({"steps": 20}, 16, 4),
        ({"denoise": 0.5}, 3, 0),
        ({"steps": 4, "widgets": OPEN}, 3, 0),
        ({"steps": 1, "widgets": OPEN}, 0, 0),
        ({"steps": 4, "cfg": 1.0, "widgets": OPEN}, 3, 0),
        ({"name": "mochi", "widgets": OPEN}, 2 * 3, 0),  # it measures each prompt
    ],
)
def test_step_counts(comfyui, case, sparse_steps, window):
    """Without a dense window the first step measures."""
    got = comfyui.run("auto", **case)
    dense = (1 + ("name" in case)) * BLOCKS
    reasons = {"before start_percent 0.2": window * BLOCKS} if window else {"measuring": dense}
    assert got["sparse"] == sparse_steps * BLOCKS and got["reasons"] == reasons
    assert got["repeatable"]
    assert ("NOTHING WAS SPARSE" in got["text"]) == (sparse_steps == 0)


@pytest.mark.parametrize("sampler", ["heun", "dpmpp_2s_ancestral"])
def test_samplers_that_evaluate_between_steps(comfyui, sampler):
    got = comfyui.run("auto", steps=5, sampler=sampler)
    assert got["forwards"] > 5
    assert got["sparse"] + got["dense"] == got["forwards"] * BLOCKS
    assert got["sparse"] > got["dense"] > 0
    assert got["repeatable"]


@pytest.mark.parametrize("mode", ["auto quality", "auto budget"])
def test_two_samplers_with_a_model_each(comfyui, mode):
    high, low = comfyui.run("two_models", mode=mode)
    assert high["reasons"] == {"before start_percent 0.2": BLOCKS}
    assert low["reasons"] == {"measuring": BLOCKS}
    assert high["sparse"] == low["sparse"] == BLOCKS


def test_conditionings_batched_or_split(comfyui):
    got = comfyui.run("auto_batched_or_split")
    together, apart = got["reports"]
    assert apart["sparse"] == 2 * together["sparse"] > 0
    assert got["same_choices"]
    assert got["error_difference"] < 1e-4
    assert got["loudness_difference"] < 1e-4
    assert got["error"] < 1e-3  # as in manual mode: matrix products of another batch size


def test_a_cancelled_run_reports(comfyui):
    got = comfyui.run("auto_cancelled")
    assert got["raised"]
    assert got["stopped"] and got["sparse"] == 4 * BLOCKS
    assert "stopped early" in got["report"]["text"].splitlines()[0]


def test_beside_other_nodes(comfyui):
    got = comfyui.run("auto_beside_others")
    assert got["compiled"]["sparse"] == 3 * BLOCKS
    assert 0 < got["cached"]["sparse"] < 8 * BLOCKS  # it skips whole steps
    # The windows have 4 and 5 frames: two shapes, each with a dense first step.
    assert sorted(got["windowed"]["shapes"]) == [320, 400]
    assert got["windowed"]["sparse"] == 2 * 3 * BLOCKS


@pytest.fixture(scope="module")
def profiles(comfyui):
    return comfyui.run("profile_saved_and_loaded")


def test_a_profile_is_saved_and_spares_the_measuring(profiles):
    assert profiles["saved"] == "Saved the profile tiny wan.safetensors."
    assert profiles["changed_since"]
    measured, loaded = (profiles["reports"][name] for name in ("measured", "loaded"))
    assert measured["reasons"] == {"before start_percent 0.2": BLOCKS}
    assert loaded["reasons"] == {}
    assert loaded["sparse"] == 4 * BLOCKS  # denoise 0.5: it would have measured
    assert measured["predicted"] == pytest.approx(profiles["errors"], rel=1e-5)
    assert loaded["predicted"] == pytest.approx(profiles["errors"], rel=1e-5)


def test_a_profile_never_leaves_its_folder(profiles):
    assert "No profile was saved" in profiles["unsafe"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("other model", "measured on WanModel and this model is LTXVModel"),
        ("other aim", "this node asks for a mean density of 50 %"),
        ("missing", "There is no profile none.safetensors"),
        ("other length", "nothing for 240 tokens"),
    ],
)
def test_a_profile_that_does_not_fit_is_not_used(profiles, case, reason):
    report = profiles["reports"][case]
    assert reason in report["text"] and "this run measures" in report["text"].lower()
    assert report["reasons"] == {"before start_percent 0.2": BLOCKS}
    assert report["sparse"] == 3 * BLOCKS


@pytest.mark.parametrize("case", ["other weights", "lora"])
def test_a_profile_of_other_weights_warns(profiles, case):
    report = profiles["reports"][case]
    assert "a finetune or a LoRA" in report["text"]
    assert report["predicted"] == profiles["reports"]["measured"]["predicted"]


def test_a_profile_in_manual_mode_is_said_to_do_nothing(profiles):
    assert "no effect in manual mode" in profiles["reports"]["manual"]["text"]


def test_a_profile_fits_prompts_of_other_lengths(comfyui):
    got = comfyui.run("profile_of_another_prompt")
    measured, loaded = got["reports"]
    assert sorted(measured["shapes"]) == [327, 340]
    assert sorted(loaded["shapes"]) == [329, 341]
    assert loaded["reasons"] == {} and loaded["sparse"] == 4 * 2 * 2
    assert measured["predicted"] == pytest.approx(got["errors"], rel=1e-5)
    assert loaded["predicted"] == pytest.approx(got["errors"], rel=1e-5)
    for text, given in ((20, 21), (7, 9)):
        said = f"The profile was measured with {text} tokens of text and is used for {given}"
        assert said in loaded["text"] and said not in measured["text"]


def test_reports_without_a_run(comfyui):
    got = comfyui.run("reports_without_a_run")
    assert "did not go through" in got["no node"]["text"]
    assert "No sampler has run" in got["no run"]["text"]
    assert all(found["passed"] for found in got.values())
