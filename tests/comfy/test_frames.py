# SPDX-License-Identifier: Apache-2.0
"""Models whose frames stand beside the clip or attend on their own, and U-Nets, in real ComfyUI."""

from __future__ import annotations

import pytest

#: As in test_families.
EIGHT_BIT = 0.004
STEPS, SPARSE_STEPS, BLOCKS = 4, 3, 2
FRAME, CLIP = 8 * 10, 4 * 8 * 10
WINDOW = "before start_percent 0.2"

# model: self-attention calls a block, segments of its token order
BESIDE = {
    "vace": (3, [CLIP]),
    "s2v": (1, [CLIP + 2 * FRAME, 4 * 5 + 4 * 2 * 2]),
    "s2v, a smaller reference": (1, [CLIP, 4 * 6]),
    "scail": (1, [FRAME, CLIP, 4 * 4 * 5]),
    "humo": (1, [CLIP + FRAME]),
    "bernini": (1, [CLIP + 2 * FRAME, 4 * 6]),
}


@pytest.mark.parametrize("name", BESIDE)
def test_frames_beside_the_clip(comfyui, name):
    """Every call is sparse, in the order of what is known of its tokens, and nothing is said of
    other tokens."""
    a_block, segments = BESIDE[name]
    got = comfyui.run("beside_the_clip", name=name)
    for mode in ("manual", "auto"):
        report, calls = got[mode]["report"], got[mode]["calls"]
        assert report["sparse"] == SPARSE_STEPS * BLOCKS * a_block == len(calls)
        assert report["reasons"] == {WINDOW: BLOCKS * a_block}
        assert all(call["segments"] == segments for call in calls)
        assert {call["tokens"] for call in calls} == {sum(segments)}
        assert "other tokens" not in report["text"]
    assert got["manual"]["error"] < EIGHT_BIT
    assert got["auto"]["error"] < 0.1


@pytest.mark.parametrize("cached", [True, False])
def test_a_model_that_attends_frame_by_frame(comfyui, cached):
    """The pose branch runs once with its cache, in the dense step. Its calls are those of the
    clip's frames, of the pose branch, and of text and image in both."""
    got = comfyui.run("frame_by_frame", cached=cached)
    poses = 0 if cached else 1
    for name in ("everything", "half"):
        report = got[name]["report"]
        assert report["sparse"] == SPARSE_STEPS * BLOCKS * (4 + poses)
        assert report["reasons"] == {WINDOW: BLOCKS * 5}
        assert report["cross"] == 2 * BLOCKS * (STEPS + (1 if cached else STEPS))
        assert "attends frame by frame" in report["text"]
        assert got[name]["tokens"] == [FRAME] + [3 * FRAME] * poses
    assert got["everything"]["error"] < EIGHT_BIT < 2 * got["half"]["error"]
    report = got["auto"]["report"]
    assert report["sparse"] == SPARSE_STEPS * BLOCKS * poses
    assert report["reasons"] == {
        "the model attends frame by frame, which only mode manual serves": STEPS * BLOCKS * 4,
        WINDOW: BLOCKS,
    }
    assert got["auto"]["tokens"] == [3 * FRAME] * poses
    assert ("NOTHING WAS SPARSE" in report["text"]) == cached
    assert "NaN" not in report["text"]


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
    report = got["report"]
    assert report["sparse"] > 0 and report["reasons"].keys() <= {WINDOW, "measuring"}
    assert got["everything"]["sparse"] == SPARSE_STEPS * (8 + 6)
    assert got["everything"]["reasons"] == {WINDOW: 8 + 6}
    assert got["error"] < 0.02


def test_merged_tokens_are_no_text(comfyui):
    """The U-Net has 8 self-attentions, of which 3 are as large as the latent."""
    got = comfyui.run("merged_tokens")
    report = got["manual"]["report"]
    assert report["sparse"] == SPARSE_STEPS * 8 and report["reasons"] == {WINDOW: 8}
    assert report["cross"] == STEPS * 8
    assert got["manual"]["error"] < 0.02
    report = got["auto"]["report"]
    assert report["reasons"]["fewer queries than keys, which only mode manual serves"] == STEPS * 3
    assert report["cross"] == STEPS * 8
    assert report["sparse"] > 0


def test_a_padded_prompt(comfyui):
    """HunyuanVideo's three blocks attend among the real tokens, 15 of 24 of text; its token
    refiner's two calls have a mask too, of text alone."""
    got = comfyui.run("padded_prompt")
    for mode in ("manual", "half", "auto"):
        report, calls = got[mode]["report"], got[mode]["calls"]
        assert report["sparse"] == SPARSE_STEPS * 3 == len(calls)
        assert report["reasons"] == {WINDOW: 3, "attention mask": 2 * STEPS}
        assert all(call["segments"] == [15, CLIP] for call in calls)
        assert "other tokens" not in report["text"]
    assert got["manual"]["error"] < EIGHT_BIT < 2 * got["half"]["error"]
    assert got["auto"]["error"] < 0.1


def test_tiles_are_self_attention(comfyui):
    """Four tiles of 256 tokens at the level that has 1,024."""
    got = comfyui.run("tiles")
    assert got["report"]["sparse"] == SPARSE_STEPS * 8
    assert got["report"]["reasons"] == {WINDOW: 8}
    assert got["report"]["cross"] == STEPS * 8
    assert got["tokens"] == [256]
    assert got["error"] < 0.02
