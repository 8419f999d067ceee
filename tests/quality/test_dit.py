# SPDX-License-Identifier: Apache-2.0
"""Clips of the small video DiT on random weights in which no part is idle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quality import steps
from benchmarks.quality.__main__ import main
from benchmarks.quality.dit import STEPS, DenseRun, sample_dense
from benchmarks.quality.end_to_end import Clips, clip_psnr
from benchmarks.quality.modes import MODES, Mode
from benchmarks.quality.rows import EMULATION, REFERENCE, read
from benchmarks.tiny_video_dit import checkpoint
from benchmarks.tiny_video_dit.latent import to_clips
from benchmarks.tiny_video_dit.model import VideoDiT
from benchmarks.tiny_video_dit.sample import sample, starting_noise
from sparge.order.grid import TokenGrid
from tests.tiny_video_dit.parts import busy_model

SIZE = (5, 12, 10)  # 600 tokens: 5 query blocks, 10 key blocks
RAGGED = 640 / 600  # budgets count the last block as a whole one
GRID = ["--grid", *map(str, SIZE)]


@pytest.fixture(scope="module")
def model() -> VideoDiT:
    return busy_model(torch.Generator().manual_seed(21), peak=2.0)


@pytest.fixture(scope="module")
def run(model: VideoDiT) -> DenseRun:
    return sample_dense(model, SIZE, seed=4)


@pytest.fixture(scope="module")
def weights(model: VideoDiT, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("weights")
    return str(checkpoint.save(folder, model.state_dict(), model.config))


def test_a_dense_run_is_the_sampler_and_sees_its_calls(run: DenseRun, model: VideoDiT) -> None:
    expected = to_clips(sample(model, starting_noise(1, SIZE, 4), run.text, STEPS))[0]
    assert torch.equal(run.clip, expected)
    assert torch.equal(run.finished(), expected)
    assert [call.place for call in run.measured_calls] == [0, 1]
    assert run.measured_calls[0].layer.q.shape == (1, 1, 600, 128)
    assert run.measured_calls[0].layer.grid == TokenGrid(*SIZE)
    assert clip_psnr(run.clip + 0.1, run.clip) == pytest.approx(20)


@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
def test_clips_in_a_mode_get_near_the_dense_one_with_density(run: DenseRun, mode: Mode) -> None:
    rows = [Clips([run]).row(mode, density) for density in (0.2, 0.6, 1.0)]
    for row in rows:
        assert row["density"] <= RAGGED * row["asked_density"]
    sparse, denser, dense = (row["psnr"] for row in rows)
    assert sparse + 2 < denser < dense - 3
    assert dense > 45, "8 bits cost little"
    assert rows[0]["data"] == "dit clips 4-4 5x12x10"


def test_rows_of_clips_and_of_targets(weights: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(steps, "_drop", lambda q, k, v, head_settings: 0.75 * v)  # quick, far off
    out = tmp_path / "rows.json"
    asked = ["--targets", "0.5", "fast", "--densities", "0.6", "--modes", "sol", "ours auto"]
    named = ["--commit", "c0", "--called", "dit of seed 9", "--seed", "6", "--clips", "2"]
    main(["--data", "dit", "--weights", weights, "--out", str(out), *asked, *named, *GRID])
    rows = read(out)
    of_targets = [("ours auto quality", REFERENCE)] * 2
    named_rows = [(row["mode"], row["where"]) for row in rows]
    assert named_rows == [("sol", EMULATION), ("ours auto", REFERENCE), *of_targets]
    assert all(row["data"] == "dit of seed 9 clips 6-7 5x12x10" for row in rows)
    assert all(row["commit"] == "c0" and 5 < row["psnr"] < 90 for row in rows)
    stricter, looser = rows[2:]
    for row in (stricter, looser):
        assert 0 <= row["heads_within"] <= 1 and 0 <= row["no_worse_than_drop"] <= 1
        assert row["target"] / 2 < row["mean_error"] <= row["worst_mean_error"] < 2 * row["target"]
    assert (stricter["target"], looser["target"]) == (0.08, 0.5)
    assert stricter["density"] > looser["density"] and stricter["psnr"] > looser["psnr"]


def test_the_nodes_targets_are_the_default(weights: str, monkeypatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(Clips, "target_row", lambda _, target: asked.append(target) or {})
    monkeypatch.setattr("benchmarks.quality.__main__._report", lambda *_: None)
    main(["--data", "dit", "--weights", weights, "--targets", "--clips", "1", *GRID])
    assert asked == [0.03, 0.05, 0.08]


def test_what_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--data", "dino", "--targets"])
    assert "--targets is for clips of dit" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["--data", "dit", "--weights", str(tmp_path / "none.safetensors")])
    assert stopped.value.code == 1
    assert "python -m benchmarks.tiny_video_dit.train --out" in capsys.readouterr().err
