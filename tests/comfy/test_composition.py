# SPDX-License-Identifier: Apache-2.0
"""The node beside other nodes that patch a model, in real ComfyUI."""

from __future__ import annotations

import pytest

BLOCKS = 2
STEPS, SPARSE = 4, 3 * BLOCKS
DENSE_AND_CROSS = BLOCKS + STEPS * BLOCKS
EIGHT_BIT = 0.004  # half of the blocks dropped is 0.03


@pytest.mark.parametrize(
    ("place", "recorded"),
    [
        ("before", DENSE_AND_CROSS),  # it is the dense path
        ("overwriting", DENSE_AND_CROSS),  # it becomes the dense path
        ("chained", SPARSE + DENSE_AND_CROSS),  # it stays outside, as its author meant it
    ],
)
def test_another_override(comfyui, place, recorded):
    got = comfyui.run("other_override", place=place)
    assert got["report"]["sparse"] == SPARSE
    assert got["recorded"] == recorded
    assert got["error"] < EIGHT_BIT


def test_an_attention_backend_chosen_after_the_node(comfyui):
    assert comfyui.run("attention_backend_node_after")["sparse"] == SPARSE


def test_the_later_of_two_nodes_replaces_the_earlier(comfyui):
    got = comfyui.run("two_of_ours")
    assert len(got["reports"]) == 1
    assert got["reports"][0]["sparse"] == SPARSE
    assert got["topks"] == [0.3]


def test_nothing_piles_up_over_many_steps(comfyui):
    got = comfyui.run("many_steps", steps=500)
    assert got["report"]["forwards"] == 500
    assert got["depths"] == 1


def test_core_sparse_node_on_the_same_model_is_named(comfyui):
    got = comfyui.run("rewraps_each_step")
    assert "Model Sparse Attention" in got["report"]["text"]
    assert got["wraps"] == got["depths"] == 1


def test_context_windows(comfyui):
    got = comfyui.run("context_windows")
    assert got["report"]["sparse"] == 2 * SPARSE  # two windows
    assert got["tokens"] == [4 * 8 * 10, 5 * 8 * 10]  # the second window gets a frame of context
    assert got["error"] < EIGHT_BIT


def test_lora(comfyui):
    got = comfyui.run("lora")
    assert got["report"]["sparse"] == SPARSE
    assert got["error"] < EIGHT_BIT < got["lora_effect"]


@pytest.mark.parametrize("name", ["wan", "mochi", "flux"])
def test_torch_compile(comfyui, name):
    for outcome in comfyui.run("compiled", name=name).values():
        first, second = outcome["reports"]
        assert first["sparse"] == second["sparse"] > 0
        assert max(outcome["errors"]) < EIGHT_BIT
