# SPDX-License-Identifier: Apache-2.0
"""Requests of `benchmarks.comfyui_call` to ComfyUI, and its use of the times, without ComfyUI."""

from __future__ import annotations

import torch

from benchmarks.comfyui_call import NodeRun, node_runs, parse, timed
from benchmarks.comfyui_host import Sampled
from benchmarks.comfyui_models import MODELS


def runs(*arguments: str) -> list[NodeRun]:
    return list(node_runs(parse(list(arguments))))


def test_runs_of_topk() -> None:
    found = runs("--topk", "0.5", "0.2")
    names = ["default", "topk 0.5, pvthreshd 15", "topk 0.2, pvthreshd 15"]
    assert [run.name for run in found] == names
    assert found[0].widgets is None
    wanted = {"mode": "manual", "topk": 0.2, "pvthreshd": 15.0, "start_percent": 0.0}
    assert found[2].widgets == wanted and not found[2].may_stay_dense


def test_runs_of_a_target_are_named_by_quality_and_ignore_topk() -> None:
    found = runs("--mode", "auto quality", "--topk", "0.5", "--quality", "high", "fast")
    assert [run.name for run in found] == ["default", "auto quality, high", "auto quality, fast"]
    for run in found[1:]:
        assert run.widgets is not None and run.may_stay_dense and "topk" not in run.widgets


def test_a_users_run_may_stay_dense() -> None:
    _, run = runs("--mode", "auto budget", "--start-percent", "0.2")
    assert run.widgets is not None and run.widgets["start_percent"] == 0.2 and run.may_stay_dense


def test_of_two_runs_the_second_counts() -> None:
    first, second = (
        Sampled(seconds, torch.empty(0), torch.empty(0), 1.0, 2.0)
        for seconds in ([9.0, 8.0, 7.0], [5.0, 3.0, 2.0])
    )
    assert timed([first, second]) == {
        "seconds_per_call": 2.5,
        "seconds": [5.0, 3.0, 2.0],
        "run_seconds": 10.0,
        "first_run_seconds": [9.0, 8.0, 7.0],
        "weights_gib": 1.0,
        "peak_gib": 2.0,
    }
    assert "first_run_seconds" not in timed([second])


def test_tiny_models_keep_their_channels() -> None:
    for name, model in MODELS.items():
        tiny = model.made_tiny()
        assert model.name == name and tiny.latent[0] == model.latent[0]
        assert tiny.config.keys() == model.config.keys() and len(tiny.latent) == len(model.latent)
