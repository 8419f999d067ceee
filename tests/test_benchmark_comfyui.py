# SPDX-License-Identifier: Apache-2.0
"""Requests of `benchmarks.whole_run` to ComfyUI, and its use of the times, without ComfyUI."""

from __future__ import annotations

import torch

from benchmarks.comfyui_host import Sampled, Sampling
from benchmarks.comfyui_models import MODELS
from benchmarks.companions import threshold_to_skip
from benchmarks.whole_run import node_runs, parse, timed


def test_runs_are_named_by_their_widgets() -> None:
    dense, _, run = node_runs(
        parse(["--mode", "manual", "--topk", "0.5", "0.2", "--start-percent", "0"])
    )
    wanted = {"mode": "manual", "topk": 0.2, "pvthreshd": 15.0, "start_percent": 0.0}
    assert (dense.name, dense.widgets) == ("default", None)
    assert (run.name, run.widgets) == ("topk 0.2, pvthreshd 15", wanted) and not run.may_stay_dense
    named = ["--topk", "0.5", "--quality", "high", "--start-percent", "0.2"]
    _, run = node_runs(parse(["--mode", "auto quality", *named]))
    assert run.name == "auto quality, high" and run.widgets and "topk" not in run.widgets
    assert run.may_stay_dense and run.widgets["start_percent"] == 0.2


def test_of_two_runs_the_second_counts() -> None:
    first, second = (
        Sampled(seconds, sum(seconds) + 1, torch.empty(0), torch.empty(0), 1.0, 2.0)
        for seconds in ([9.0, 8.0, 7.0], [5.0, 3.0, 2.0])
    )
    found = timed([first, second], Sampling(3))
    assert (found["seconds_per_call"], found["run_seconds"]) == (2.5, 11.0)
    assert (found["first_run_seconds"], found["first_wall_seconds"]) == ([9.0, 8.0, 7.0], 25.0)
    assert "first_run_seconds" not in timed([first], Sampling(3))


def test_steps_that_were_not_taken_count_as_long_as_the_last() -> None:
    two_calls_a_step = Sampled([5.0, 5.0, 2.0, 1.0], 14.0, torch.empty(0), torch.empty(0), 1.0, 2.0)
    found = timed([two_calls_a_step], Sampling(20, only_first=2))
    assert (found["run_seconds"], found["sampled_seconds"]) == (14 + 18 * 3, 14)
    assert found["extrapolated"] == "2 of 20 steps, the others as long as the last"


def test_models_in_a_row_share_the_steps() -> None:
    assert Sampling(20).parts(2) == [(0, 10), (10, 20)]
    assert Sampling(20, only_first=7).parts(1) == [(0, 7)]


def test_a_threshold_is_found_for_a_number_of_steps() -> None:
    found = threshold_to_skip(7, lambda threshold: int(10 * threshold))
    assert 0.7 <= found < 0.8


def test_tiny_models_keep_their_channels() -> None:
    for name, model in MODELS.items():
        tiny = model.made_tiny()
        assert model.name == name and tiny.latent[0] == model.latent[0]
        assert tiny.config.keys() == model.config.keys() and len(tiny.latent) == len(model.latent)
