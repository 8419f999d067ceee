# SPDX-License-Identifier: Apache-2.0
"""Calls are taken for those of the block and model that they are of, in real ComfyUI."""

from __future__ import annotations

import pytest

BLOCKS = 2  # of the tiny models
COND, UNCOND = [0], [1]


@pytest.mark.parametrize("family", ["ltxv", "ltxav", "mochi"])
def test_skip_layer_guidance_shifts_no_block(comfyui, family):
    """It leaves the first block of the negative prompt out."""
    found = comfyui.run("skipped_layer", family=family, layer=0)
    assert found["seen"] == [[COND, 0, 0], [COND, 1, 1], [UNCOND, 1, 1]]
    assert found["report"]["sparse"] > 0


@pytest.mark.parametrize("family", ["ltxv", "ltxav"])
def test_spatio_temporal_guidance_shifts_no_block(comfyui, family):
    found = comfyui.run("spatio_temporal_guidance", family=family)
    assert {(running, row) for _, running, row in found["seen"]} == {(0, 0), (1, 1)}
    assert len(found["report"]["by_step"]) == BLOCKS, "and sound is none"
    assert found["report"]["sparse"] > 0


def test_a_guide_of_half_the_size_leaves_blocks_apart(comfyui):
    found = comfyui.run("guide_of_half_the_size")
    assert {(running, row) for _, running, row in found["seen"]} == {(0, 0), (1, 1)}
    assert len(found["report"]["by_step"]) == BLOCKS
    assert found["report"]["sparse"] > 0


def test_two_models_of_a_guider_share_no_measured_heads(comfyui):
    found = comfyui.run("two_models_of_a_guider")
    assert found["tables"] == {"first": 1, "second": 1} and found["shared"] == 0
    assert "a second model" in found["report"]["text"]
