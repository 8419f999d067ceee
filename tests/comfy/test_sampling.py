# SPDX-License-Identifier: Apache-2.0
"""Samplers, schedules, windows, cancelling and errors in real ComfyUI."""

from __future__ import annotations

import pytest

from tests.comfy.expected import BLOCKS, EIGHT_BIT, FAST, WINDOW

OPEN = {"start_percent": 0.0}
ALL = {"topk": 1.0}
AUTO = {"mode": "auto quality"}


@pytest.mark.parametrize(
    ("widgets", "case", "sparse", "reasons"),
    [
        (ALL, {"steps": 1}, 0, {WINDOW: 1}),
        (ALL, {"steps": 20}, 16, {WINDOW: 4}),
        (ALL | OPEN, {"steps": 1}, 1, {}),
        (ALL | {"end_percent": 0.6}, {"steps": 10}, 5, {WINDOW: 2, "after end_percent 0.6": 3}),
        (ALL, {"denoise": 0.5}, 4, {}),  # it starts inside the window
        # Without a dense window the first step measures.
        (AUTO, {"steps": 1}, 0, {WINDOW: 1}),
        (AUTO, {"steps": 20}, 16, {WINDOW: 4}),
        (AUTO, {"denoise": 0.5}, 3, {"measuring": 1}),
        (AUTO | OPEN, {}, 3, {"measuring": 1}),
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
    assert ("NOTHING WAS SPARSE" in got["text"]) == (sparse == 0)
    assert got["error"] < (EIGHT_BIT if "topk" in widgets else 0.1)
    if case.get("steps") == 1 and "start_percent" not in widgets:
        said = "is before start_percent: 0" if "topk" in widgets else "with start_percent 0"
        assert f"{said} can make it sparse" in got["text"]


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


@pytest.mark.parametrize("widgets", [{"topk": 0.3}, FAST], ids=str)
def test_conditionings_batched_or_split(comfyui, widgets):
    got = comfyui.run("batched_or_split", **widgets)
    together, apart = got["reports"]
    assert apart["sparse"] == 2 * together["sparse"] > 0
    # Float32 matrix products of another batch size differ in the last bit, and 8 bits amplify that.
    assert got["error"] < 1e-3
    if "mode" in widgets:
        assert max(got["differences"].values()) < 1e-4
        assert got["differences"]["density"] == 0


@pytest.mark.parametrize("widgets", [{}, AUTO], ids=str)
def test_cancel_leaves_a_report_and_nothing_else(comfyui, widgets):
    got = comfyui.run("cancelled", at=2, steps=5, **widgets)
    whole, cut, again = got["reports"]
    assert got["raised"] and cut["stopped"] and "stopped early" in cut["text"]
    assert cut["sparse"] == 2 * BLOCKS
    assert got["same_after"] and again == whole
    assert got["options"] == ["optimized_attention_override"]


@pytest.mark.parametrize(
    ("kind", "inside", "raised"),
    [
        ("interrupt", "library", "InterruptProcessingException"),
        ("interrupt", "model", "InterruptProcessingException"),
        ("bug", "model", "RuntimeError"),
    ],
)
def test_what_comfyui_has_to_see_is_not_swallowed(comfyui, kind, inside, raised):
    got = comfyui.run("raising", kind=kind, inside=inside)
    assert got["raised"] == raised and got["stopped"]
    if inside == "model":
        assert got["verdict"] == "Stopped before the first sparse step"
        assert got["text"].startswith("stopped before the first sparse step; ")
        assert "reach" not in got["text"]
