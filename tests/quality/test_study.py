# SPDX-License-Identifier: Apache-2.0
"""Path from calls to rows: samples that do not overlap, head settings that hold, true figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.quality.__main__ import main
from benchmarks.quality.data import DataSet
from benchmarks.quality.heads import JudgedHeads
from benchmarks.quality.judge import Call, HeadError, head_errors, psnr, summary
from benchmarks.quality.measured import Measured
from benchmarks.quality.modes import BY_NAME, MODES
from benchmarks.quality.study import Study
from sparge.blocks import QUERY_BLOCK

AUTO = BY_NAME["ours auto"]


def test_judged_rows_are_not_those_measurement_saw(video: Call) -> None:
    seen = Measured.on([video], 1, blocks_a_call=4).seen[0]
    assert len(seen) == 4
    operands = video.quantized(cubes=True)
    usable = len(operands.query_counts) - 1  # the exact tokens' block is no sample
    tokens = video.drawn(usable - 4, 1, seen)
    assert operands.order is not None
    drawn = set((operands.order.token_slot[tokens] // QUERY_BLOCK).tolist())
    assert len(drawn) == usable - 4 and not drawn & seen and 0 not in drawn
    with pytest.raises(ValueError, match="that the measurement did not see"):
        video.drawn(usable - 3, 1, seen)


def test_rows_keep_the_asked_density_and_ours_beats_drop(video: Call) -> None:
    study = Study(DataSet("made", [video], [video]), MODES, 3, 4, seed=0)
    rows = {mode.name: study.row(mode, 0.4) for mode in MODES}
    for row in rows.values():
        assert row["density"] <= 0.4 + 1e-9
        assert 0 < row["rel_l2"] <= row["worst_rel_l2"] and row["layers"] == 1
    assert rows["ours auto"]["rel_l2"] < 0.7 * rows["drop"]["rel_l2"]
    head_settings = study.budgets(AUTO, 0.4)[0]
    assert head_settings.density[0] != head_settings.density[1], "what the heads need"


def test_the_command_judges_calls(video: Call, monkeypatch, tmp_path: Path) -> None:
    module, out = "benchmarks.quality.__main__", tmp_path / "rows.json"
    monkeypatch.setattr(f"{module}.load", lambda _: DataSet("made", [video], [video]))
    asked = ["--densities", "0.4", "--blocks", "3", "--measured-blocks", "4"]
    main(["--data", "dino", "--modes", "drop", "ours auto", *asked, "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["data"], row["mode"]) for row in rows] == [("made", "drop"), ("made", "ours auto")]
    assert rows[1]["rel_l2"] < 0.7 * rows[0]["rel_l2"]


def test_layers_are_measured_in_all_their_calls(video: Call) -> None:
    calls = [replace(video, place=place) for place in (0, 1, 0, 1)]
    measured = Measured.on(calls, 2, blocks_a_call=2)
    assert measured.measurement.blocks_measured == [4, 4]
    study = Study(DataSet("made", calls[:2], calls), [AUTO], 2, 3, seed=0)
    assert len(study.budgets(AUTO, 0.5)) == 2
    with pytest.raises(ValueError, match="saw 1 layers; 2"):
        Measured.on([video, video], 2, blocks_a_call=2)


def test_errors_of_known_vectors() -> None:
    truth = torch.tensor([[[3.0, -1.0], [0.0, 0.0]]])
    value = truth + torch.tensor([[[0.3, 0.0], [0.0, -0.4]]])
    (error,) = head_errors("layer", value, truth)
    assert error.name == "layer head 0"
    assert error.rel_l2 == pytest.approx(0.5 / math.sqrt(10))
    assert error.psnr == pytest.approx(10 * math.log10(16 / (0.25 / 4)))
    assert psnr(truth, truth) == math.inf
    found = summary([HeadError(f"h{i}", i / 50, 30.0 + i) for i in range(1, 41)])
    assert found["rel_l2"] == pytest.approx(0.41) and found["psnr"] == pytest.approx(50.5)
    assert (found["worst_head"], found["worst_rel_l2"]) == ("h40", 0.8)


def clip(found: list[list[float]], dropped: float = 0.1) -> JudgedHeads:
    """Two steps of a layer with as many heads as each step has errors; 0.1 is expected."""
    errors = torch.tensor(found, dtype=torch.float64).view(1, 2, 1, -1)
    expected, drop = torch.full_like(errors, 0.1), torch.full_like(errors, dropped)
    return JudgedHeads(errors, expected, drop, torch.ones_like(errors))


def test_heads_are_judged_by_their_means_over_the_steps_and_count_by_their_head_weight() -> None:
    shares = clip([[0.1, 0.05, 0.2], [0.1, 0.2, 0.2]]).shares()
    assert shares["heads_within"] == pytest.approx(2 / 3), "the second in the mean alone"
    assert shares["no_worse_than_drop"] == pytest.approx(1 / 3)
    loud = torch.tensor([3.0, 1.0, 0.0]).double()
    judged = clip([[0.1, 0.5, 9.0], [0.1, 0.3, 9.0]])
    one = replace(judged, head_weight=loud.expand(1, 2, 1, 3))
    assert one.shares()["mean_error"] == pytest.approx((3 * 0.1 + 0.4) / 4)
    other = replace(one, found=2 * one.found)
    shares = JudgedHeads.of_clips([other, one]).shares()
    assert shares["mean_error"] == pytest.approx(1.5 * 0.175)
    assert shares["worst_mean_error"] == pytest.approx(2 * 0.175)
