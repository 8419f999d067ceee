# SPDX-License-Identifier: Apache-2.0
"""Every family in real ComfyUI, and other models: which calls go sparse, and that text stays exact.

Weights are random: what counts is that heads are measured and sparse, not how sparse.
"""

from __future__ import annotations

import pytest

from tests.comfy.expected import EIGHT_BIT, FAST, SPARSE_STEPS, STEPS, WINDOW

BUDGET = {"mode": "auto budget", "topk": 0.6}
FRAME, CLIP = 8 * 10, 4 * 8 * 10

# family: (blocks, forward passes a step, exact (prefix, suffix) token counts, grid tokens)
CASES = {
    "mochi": (2, 2, [(0, 7), (0, 20)], CLIP),  # prompts differ in length: never batched
    "cogvideox": (2, 1, [(24, 0)], CLIP),
    "cogvideox15": (2, 1, [(24, 0)], 3 * FRAME),  # 5 frames in pairs, the last one padded
    "wan": (2, 1, [(0, 0)], CLIP),
    "hunyuan": (3, 1, [(24, 0)], CLIP),
    "ltxv": (2, 1, [(0, 0)], CLIP),
    "ltxav": (2, 1, [(0, 0)], CLIP),
    "kandinsky": (2, 1, [(0, 0)], CLIP),
    "flux": (3, 1, [(24, 0)], 18 * 20),
}


@pytest.mark.parametrize("name", CASES)
def test_families(comfyui, name):
    blocks, passes, exact, grid = CASES[name]
    widgets = {"topk": 1.0}, {"topk": 0.5}, {"dense_blocks": "-1"}, FAST, BUDGET
    *runs, untouched = comfyui.sampled(name, *widgets, None)
    everything, half, listed, quality, budget = runs
    assert untouched["error"] == 0, "the model is as it was"
    segments = {tuple(filter(None, (before, grid, after))) for before, after in exact}
    for run in runs:
        assert run["passes"] == STEPS * passes
        assert run["reasons"][WINDOW] == passes * blocks
        assert {tuple(call["exact"]) for call in run["calls"]} == set(exact)
        assert {tuple(call["segments"]) for call in run["calls"]} == segments
        assert {call["tokens"] - sum(call["exact"]) for call in run["calls"]} == {grid}
        if run is not listed:
            assert run["sparse"] == SPARSE_STEPS * passes * blocks
    if name in ("wan", "ltxv"):
        assert (everything["cross"], everything["dense"]) == (STEPS * blocks, blocks)
    assert everything["density"] == 1.0 and everything["error"] < EIGHT_BIT
    # 2 or 3 of 4 to 6 blocks of video, in whole steps with those of text; all that text attends to
    assert 0.39 < half["density"] < 0.9 and everything["error"] < 0.2 * half["error"]
    assert listed["reasons"]["listed in dense_blocks"] == SPARSE_STEPS * passes
    assert listed["sparse"] == SPARSE_STEPS * passes * (blocks - 1)
    for run in (quality, budget):
        assert all(call["measured"] for call in run["calls"])
        assert sorted(run["shapes"]) == sorted(map(sum, segments))
        assert run["kept"] and f"(heads {100 * min(run['kept']):.1f} %" in run["text"]
    assert 0 < quality["error_of_heads"] <= 0.1 and quality["error"] < 0.1
    assert f"; error {quality['error_of_heads']:.3f}" in quality["text"]
    # One block for all to share is the least; text and the first query block come on top.
    assert budget["density"] < 0.85 and budget["error"] < 0.3


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_weight_types(comfyui, dtype):
    (got,) = comfyui.sampled("wan", {"topk": 1.0}, dtype=dtype)
    assert got["sparse"] == SPARSE_STEPS * 2
    assert got["error"] < 0.03  # bf16 rounding of the latent itself is 0.01


def test_a_model_without_a_row_is_sparse(comfyui):
    """One dense step is enough to measure it: distilled models have few."""
    auto = {"mode": "auto quality", "quality": "high"}
    everything, measured = comfyui.sampled("unet", {"topk": 1.0}, auto)
    for got in (everything, measured):
        assert got["sparse"] == SPARSE_STEPS * 7 and got["reasons"] == {WINDOW: 7}
    assert {call["tokens"] for call in everything["calls"]} == {24 * 28, 12 * 14}
    assert all(call["measured"] for call in measured["calls"])
    assert everything["error"] < EIGHT_BIT and measured["error"] < 0.1
    said = everything["text"]
    assert said.startswith("UNetModel, 672 tokens; ")
    assert "tokens stay in the order they come" in said


# model: self-attention calls a block, segments of its token order
BESIDE = {
    "vace": (3, [CLIP]),
    "s2v": (1, [CLIP + FRAME, FRAME + 4 * 5 + 4 * 2 * 2]),
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
    everything, auto = comfyui.sampled(name, {"topk": 1.0}, FAST)
    for got in (everything, auto):
        assert got["sparse"] == SPARSE_STEPS * 2 * a_block == len(got["calls"])
        assert got["reasons"] == {WINDOW: 2 * a_block}
        assert all(call["segments"] == segments for call in got["calls"])
        assert {call["tokens"] for call in got["calls"]} == {sum(segments)}
        assert "other tokens" not in got["text"]
    assert everything["error"] < EIGHT_BIT and auto["error"] < 0.1


@pytest.mark.parametrize("before", ["pose cache", ""])
def test_a_model_that_attends_frame_by_frame(comfyui, before):
    """The pose branch runs once with its cache, in the dense step. Its calls are those of the
    clip's frames, of the pose branch, and of text and image in both."""
    cached = bool(before)
    poses = 0 if cached else 1
    *manual, auto = comfyui.sampled("animate2", {"topk": 1.0}, {"topk": 0.5}, FAST, before=before)
    for got in manual:
        assert got["sparse"] == SPARSE_STEPS * 2 * (4 + poses)
        assert got["reasons"] == {WINDOW: 2 * 5}
        assert got["cross"] == 2 * 2 * (STEPS + (1 if cached else STEPS))
        assert "attends frame by frame" in got["text"]
        assert {call["tokens"] for call in got["calls"]} == {FRAME, *[3 * FRAME] * poses}
    assert manual[0]["error"] < EIGHT_BIT < 2 * manual[1]["error"]
    why = "the model attends frame by frame, which only mode manual serves"
    assert auto["sparse"] == SPARSE_STEPS * 2 * poses
    assert auto["reasons"] == {why: STEPS * 2 * 4, WINDOW: 2}
    assert {call["tokens"] for call in auto["calls"]} == {*[3 * FRAME] * poses}
    assert ("NOTHING WAS SPARSE" in auto["text"]) == cached and "NaN" not in auto["text"]


def test_a_padded_prompt(comfyui):
    """HunyuanVideo's three blocks attend among the real tokens, 15 of 24 of text; its token
    refiner's two calls have a mask too, of text alone. ComfyUI does not batch such masks."""
    widgets = {"topk": 1.0}, {"topk": 0.5}, FAST
    runs = everything, half, auto = comfyui.sampled("hunyuan, padded", *widgets, cfg=1.0)
    for got in runs:
        assert got["sparse"] == SPARSE_STEPS * 3 == len(got["calls"])
        assert got["reasons"] == {WINDOW: 3, "attention mask": 2 * STEPS}
        assert all(call["segments"] == [15, CLIP] for call in got["calls"])
        assert "other tokens" not in got["text"]
    assert everything["error"] < EIGHT_BIT < 2 * half["error"] and auto["error"] < 0.1
