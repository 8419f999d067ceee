# SPDX-License-Identifier: Apache-2.0
"""Requests of `benchmarks.whole_run` to ComfyUI, and its use of the times, without ComfyUI."""

from __future__ import annotations

import torch

from benchmarks.comfyui_host import Sampled
from benchmarks.comfyui_models import MODELS
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
        Sampled(seconds, torch.empty(0), torch.empty(0), 1.0, 2.0)
        for seconds in ([9.0, 8.0, 7.0], [5.0, 3.0, 2.0])
    )
    found = timed([first, second])
    assert (found["seconds_per_call"], found["run_seconds"]) == (2.5, 10.0)
    assert found["first_run_seconds"] == [9.0, 8.0, 7.0] and "first_run_seconds" not in timed(
        [first]
    )


def test_tiny_models_keep_their_channels() -> None:
    for name, model in MODELS.items():
        tiny = model.made_tiny()
        assert model.name == name and tiny.latent[0] == model.latent[0]
        assert tiny.config.keys() == model.config.keys() and len(tiny.latent) == len(model.latent)
