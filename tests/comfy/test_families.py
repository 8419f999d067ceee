# SPDX-License-Identifier: Apache-2.0
"""Every family in real ComfyUI: which calls go sparse, and that text stays exact."""

from __future__ import annotations

import pytest

#: Relative error of the latent with every block kept, in 8 bits: at most 0.0019 (Mochi) here.
EIGHT_BIT = 0.004

#: 4 steps, of which start_percent 0.2 leaves the first dense.
SPARSE_STEPS, STEPS = 3, 4

# family: (blocks, forward passes a step, exact (prefix, suffix) token counts, grid tokens)
CASES = {
    "mochi": (2, 2, [[0, 7], [0, 20]], 4 * 8 * 10),  # prompts differ in length: never batched
    "cogvideox": (2, 1, [[24, 0]], 4 * 8 * 10),
    "cogvideox15": (2, 1, [[24, 0]], 3 * 8 * 10),  # 5 frames in pairs, the last one padded
    "wan": (2, 1, [[0, 0]], 4 * 8 * 10),
    "hunyuan": (3, 1, [[24, 0]], 4 * 8 * 10),
    "ltxv": (2, 1, [[0, 0]], 4 * 8 * 10),
    "ltxav": (2, 1, [[0, 0]], 4 * 8 * 10),
    "kandinsky": (2, 1, [[0, 0]], 4 * 8 * 10),
    "flux": (3, 1, [[24, 0]], 18 * 20),
}


@pytest.mark.parametrize("name", CASES)
def test_family(comfyui, name):
    blocks, passes, exact, grid = CASES[name]
    got = comfyui.run("family", name=name)
    for report in got["reports"]:
        assert report["sparse"] == SPARSE_STEPS * passes * blocks
        assert report["reasons"]["before start_percent 0.2"] == passes * blocks
        assert report["forwards"] == STEPS * passes
    all_kept, half_kept = (report["density"] for report in got["reports"])
    assert all_kept == 1.0
    # 2 or 3 of 4 to 6 blocks of video, in whole steps with those of text; all that text attends to
    assert 0.39 < half_kept < 0.9
    assert got["error_all"] < EIGHT_BIT
    assert got["error_all"] < 0.2 * got["error_half"]
    assert got["original_unchanged"]
    assert sorted({tuple(call["exact"]) for call in got["calls"]}) == [tuple(e) for e in exact]
    assert {call["tokens"] - sum(call["exact"]) for call in got["calls"]} == {grid}


@pytest.mark.parametrize("name", CASES)
def test_a_token_order_changes_nothing_but_rounding(comfyui, name):
    """Everything kept: order on and off differ by which tokens share an 8-bit scale, and in 16 bits
    by the order of sums alone."""
    _, _, exact, grid = CASES[name]
    got = comfyui.run("order_on_and_off", name=name)
    eight_bit, sixteen_bit = got["errors"]
    assert 0 < eight_bit < EIGHT_BIT
    assert sixteen_bit < EIGHT_BIT / 5
    segments = {tuple(filter(None, (before, grid, after))) for before, after in exact}
    assert {tuple(found) for found in got["segments"]} == segments


@pytest.mark.parametrize("name", ["wan", "ltxv"])
def test_cross_attention_is_counted_apart(comfyui, name):
    report = comfyui.run("family", name=name)["reports"][0]
    assert report["cross"] == STEPS * 2
    assert report["dense"] == 2


@pytest.mark.parametrize(
    "name", ["mochi", "cogvideox", "ltxv", "ltxav", "hunyuan", "wan", "kandinsky", "flux"]
)
def test_dense_blocks_work_where_the_model_publishes_no_block_number(comfyui, name):
    blocks, passes, *_ = CASES[name]
    report = comfyui.run("run", name=name, widgets={"dense_blocks": "-1"})
    assert report["reasons"]["listed in dense_blocks"] == SPARSE_STEPS * passes
    assert report["sparse"] == SPARSE_STEPS * passes * (blocks - 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_weight_types(comfyui, dtype):
    report = comfyui.run("run", dtype=dtype)
    assert report["sparse"] == SPARSE_STEPS * 2
    assert report["error"] < 0.03  # bf16 rounding of the latent itself is 0.01
