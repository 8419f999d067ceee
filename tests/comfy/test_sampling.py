# SPDX-License-Identifier: Apache-2.0
"""Samplers, schedules, windows, cancelling and errors in real ComfyUI."""

from __future__ import annotations

import pytest

BLOCKS = 2  # of the tiny Wan, which batches cond and uncond in one forward pass
EIGHT_BIT = 0.004  # half of the blocks dropped is 0.03


@pytest.mark.parametrize(
    ("case", "sparse", "dense"),
    [
        ({"steps": 1}, 0, 1),
        ({"steps": 4}, 3, 1),
        ({"steps": 20}, 16, 4),
        ({"steps": 1, "widgets": {"topk": 1.0, "start_percent": 0.0}}, 1, 0),
        ({"steps": 10, "widgets": {"topk": 1.0, "end_percent": 0.6}}, 5, 5),
        ({"denoise": 0.5}, 4, 0),  # it starts inside the window
    ],
)
def test_step_counts(comfyui, case, sparse, dense):
    report = comfyui.run("run", **case)
    assert (report["sparse"], report["dense"]) == (sparse * BLOCKS, dense * BLOCKS)
    assert report["error"] < EIGHT_BIT
    assert ("NOTHING WAS SPARSE" in report["text"]) == (sparse == 0)
    if "end_percent" in case.get("widgets", {}):
        assert report["reasons"]["after end_percent 0.6"] == 3 * BLOCKS


def test_steps_take_the_orders_in_turn(comfyui):
    found = comfyui.run("orders", steps=10)
    steps = [found[at : at + BLOCKS] for at in range(0, len(found), BLOCKS)]
    assert len(steps) == 8
    assert all(step == step[:1] * BLOCKS for step in steps)
    assert steps[:5] == steps[3:] and len(set(map(str, steps[:3]))) == 3


@pytest.mark.parametrize("sampler", ["heun", "dpm_2", "dpmpp_2s_ancestral", "seeds_3"])
def test_samplers_that_evaluate_between_steps(comfyui, sampler):
    report = comfyui.run("run", steps=5, sampler=sampler, widgets={"topk": 1.0})
    assert report["forwards"] > 5
    assert report["sparse"] + report["dense"] == report["forwards"] * BLOCKS
    assert report["sparse"] > report["dense"] > 0


def test_a_schedule_that_rises_again_is_dense_again(comfyui):
    report = comfyui.run("schedule_that_rises_again")
    assert (report["sparse"], report["dense"]) == (4 * BLOCKS, 2 * BLOCKS)


def test_two_samplers_with_a_model_each(comfyui):
    got = comfyui.run("split_over_two_models")
    high, low = got["reports"]
    assert (high["sparse"], high["dense"]) == (BLOCKS, BLOCKS)
    assert (low["sparse"], low["dense"]) == (2 * BLOCKS, 0)
    assert got["error"] < EIGHT_BIT


def test_the_window_is_resolved_when_sampling_starts(comfyui):
    before, after = comfyui.run("window_follows_a_later_shift")
    assert before["sparse"] == after["sparse"] == 8 * BLOCKS


def test_the_same_seed_gives_the_same_output(comfyui):
    got = comfyui.run("batched_or_split")
    together, again, apart = got["reports"]
    assert got["repeatable"]
    assert together == again
    assert apart["sparse"] == 2 * together["sparse"]
    # Float32 matrix products of another batch size differ in the last bit, and 8 bits amplify that.
    assert got["error"] < 1e-3


def test_cancel_leaves_a_report_and_nothing_else(comfyui):
    got = comfyui.run("cancelled")
    whole, cut, again = got["reports"]
    assert got["raised"]
    assert cut["stopped"] and "stopped early" in cut["text"]
    assert cut["sparse"] == BLOCKS
    assert got["same_after"] and again == whole
    assert got["options"] == ["optimized_attention_override"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("unsupported", "the test allows nothing"),
        ("build", "a kernel did not compile (see the log)"),
        ("bug", "an error of this node (see the log)"),
        ("shape", "an error of this node (see the log)"),
    ],
)
def test_what_the_library_raises_is_dense_with_its_reason(comfyui, kind, reason):
    got = comfyui.run("library_raises", kind=kind)
    assert got["report"]["reasons"][reason] == 3 * BLOCKS
    assert got["same_as_dense"] and not got["raised"]
    assert "NOTHING WAS SPARSE" in got["report"]["text"]
    assert got["calls"] == 1 or kind != "build", "the rest of the run is dense"
    if kind in ("bug", "shape"):
        log = comfyui.log_path.read_text()
        assert f"a {kind}. Please report it." in log and "Traceback" in log


@pytest.mark.parametrize(
    ("kind", "raised"),
    [("memory", "OutOfMemoryError"), ("interrupt", "InterruptProcessingException")],
)
def test_what_comfyui_has_to_see_is_not_swallowed(comfyui, kind, raised):
    got = comfyui.run("library_raises", kind=kind)
    assert got["raised"] == raised
    assert got["report"]["stopped"]


def test_without_a_gpu_everything_stays_dense_and_one_line_says_why(comfyui):
    got = comfyui.run("without_a_gpu")
    assert got["same_as_dense"]
    assert (got["report"]["sparse"], got["report"]["dense"]) == (0, 4 * BLOCKS)
    assert "NOTHING WAS SPARSE" in got["report"]["text"]
    assert "NVIDIA" in got["report"]["text"]
