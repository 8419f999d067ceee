# SPDX-License-Identifier: Apache-2.0
"""Requests of `benchmarks.comfyui_call` to ComfyUI, and its use of the times, without ComfyUI."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import pytest
import torch

from benchmarks.comfyui_call import parse, per_call, timed
from benchmarks.comfyui_costs import HeadCosts
from benchmarks.comfyui_host import Sampled
from benchmarks.comfyui_profile import profile_with_residual, with_residual
from benchmarks.comfyui_runs import NodeRun, node_runs
from sparge import Router
from sparge.tune import Fingerprint, HeadChoices, Profile, Table


def choices(layers: int, heads: int, *, dense_layers: tuple[int, ...] = ()) -> HeadChoices:
    """Choices as random weights give them, but that not one head has pooled keys."""
    measured = torch.ones(layers, dtype=torch.bool)
    measured[list(dense_layers)] = False
    shape = (layers, heads)
    router = torch.arange(layers * heads).view(shape).int() % 2 * Router.ERROR
    density, none = torch.full(shape, 0.2), torch.zeros(shape)
    settings = (none, none + 1.5, router, router % 2)
    return HeadChoices(density, *settings, density / 2, none + 1, measured)


def profile(found: HeadChoices) -> Profile:
    model = Fingerprint.of("Wan", {"norm": torch.ones(3)})
    return Profile(model, {Table("shared", 320): found}, "budget", 0.2, "2026-01-01", {})


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0])
def test_just_that_share_of_heads_has_the_residual(share: float) -> None:
    found = choices(40, 40)
    asked = with_residual(found, share)
    assert asked.gain.unique().tolist() == sorted({float(share == 1), float(share > 0)})
    assert int(asked.gain.sum()) == round(share * 1600)
    of_layers = asked.gain.sum(1)
    assert of_layers.max() - of_layers.min() <= 1, "evenly spread"
    assert asked.router is found.router and asked.walk is found.walk
    assert torch.equal(asked.contrast, 1.5 - asked.gain / 2), "of the pool weight that was measured"
    assert not found.gain.any() and (found.contrast == 1.5).all(), (
        "the measured ones stay as they are"
    )


def test_layers_without_a_measurement_have_no_part_in_the_share() -> None:
    asked = with_residual(choices(6, 4, dense_layers=(0, 5)), 0.5)
    assert asked.gain.sum(1).tolist() == [0, 2, 2, 2, 2, 0]


def test_a_head_that_had_the_residual_may_lose_it() -> None:
    found = choices(2, 4)
    found.gain.fill_(0.85)
    asked = profile_with_residual(profile(found), 0.25)
    (made,) = asked.choices.values()
    assert made.gain.tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]
    assert (asked.mode, asked.asked) == ("budget", 0.2), "the node takes it for its own aim"


def runs(*arguments: str, profiles: bool = True) -> list[NodeRun]:
    return list(node_runs(parse(list(arguments)), profiles=profiles))


def test_runs_of_topk() -> None:
    found = runs("--topk", "0.5", "0.2")
    assert [run.name for run in found] == [
        "default",
        "topk 0.5, pvthreshd 15",
        "topk 0.2, pvthreshd 15",
    ]
    assert found[0].widgets is None
    wanted = {"mode": "manual", "topk": 0.2, "pvthreshd": 15.0, "start_percent": 0.0}
    assert found[2].widgets == wanted and not found[2].may_stay_dense


def test_runs_of_a_target_are_named_by_quality_and_ignore_topk() -> None:
    asked = ["--mode", "auto quality", "--topk", "0.5", "0.2", "--residual", "0.5"]
    found = runs(*asked)
    named = "auto quality, balanced"
    with_residual = f"{named}, residual in 0.5"
    assert [run.name for run in found] == ["default", named, with_residual]
    assert [run.residual for run in found] == [None, None, 0.5]
    for run in found[1:]:
        assert run.widgets is not None and run.may_stay_dense
        assert run.widgets["quality"] == "balanced" and "topk" not in run.widgets
    three = runs(*asked, "--quality", "high", "balanced", "fast", profiles=False)
    assert [run.name.split(", ")[-1] for run in three[1:]] == ["high", "balanced", "fast"]


def test_a_users_run_may_stay_dense() -> None:
    _, run = runs("--mode", "auto budget", "--start-percent", "0.2")
    assert run.widgets is not None and run.widgets["start_percent"] == 0.2 and run.may_stay_dense


def test_manual_has_no_residual(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--residual", "0.5"])
    assert "manual has no residual" in capsys.readouterr().err


def sampled(seconds: list[float], calibration: float = 0.0) -> Sampled:
    rest = [0.0] * (len(seconds) - 1)
    heads = {"calibration_s": [calibration, *rest], "choosing_s": [0.0, 0.25, *rest[1:]]}
    nothing = torch.empty(0)
    return Sampled(seconds, heads, nothing, nothing, 1.0, 2.0)


def test_a_line_without_the_node_has_no_calibration() -> None:
    assert timed([sampled([3.0, 2.0, 1.5, 1.0])], None) == {
        "seconds_per_call": 1.5,
        "seconds": [3.0, 2.0, 1.5, 1.0],
        "run_seconds": 7.5,
        "weights_gib": 1.0,
        "peak_gib": 2.0,
    }


def test_of_two_runs_the_second_counts() -> None:
    dense = sampled([4.0, 4.0])
    line = timed([sampled([9.0, 8.0, 7.0], 1.0), sampled([5.0, 3.0, 3.0], 0.5)], dense)
    assert line["seconds_per_call"] == per_call(sampled([5.0, 3.0, 3.0])) == 3.0
    assert line["seconds"] == [5.0, 3.0, 3.0]
    assert line["first_run_seconds"] == [9.0, 8.0, 7.0]
    assert line["calibration_s"] == [0.5, 0.0, 0.0] and line["choosing_s"] == [0.0, 0.25, 0.0]
    assert line["calibration_share_of_dense_call"] == 0.125


class Work:
    """Stands for Calibration and for StepChoices."""

    def __init__(self) -> None:
        time.sleep(0.02)

    def sample(self, layer: int) -> int:
        time.sleep(0.01)
        return layer

    def at(self, step: int) -> int:
        time.sleep(0.02)
        return step

    def choose_anew(self) -> None:
        time.sleep(0.03)
        raise ValueError("nothing was measured")


def test_costs_are_those_of_the_calls_that_paid_them() -> None:
    calibration, steps = type("C", (Work,), {}), type("S", (Work,), {})
    costs = HeadCosts(torch.device("cpu"), calibration, steps)
    now = Namespace(call=0)
    sampler = calibration()
    for _ in range(2):  # a second run begins at nothing
        costs.begin(lambda: now.call)
        now.call = 0
        assert [sampler.sample(layer) for layer in range(3)] == [0, 1, 2]
        now.call = 1
        chosen: Any = steps()
        now.call = 2
        assert chosen.at(7) == 7
        now.call = 3
        with pytest.raises(ValueError):
            chosen.choose_anew()
        found = costs.of_calls(4)
    first, *others = found["calibration_s"]
    assert 0.03 <= first < 0.3 and not any(others)
    none, made, given, anew = found["choosing_s"]
    assert not none and all(0.02 <= seconds < 0.3 for seconds in (made, given, anew))
